"""The views of an image that a tower for tiles gets: one tile or several, and which of their embeddings are kept."""

import msgspec


class OneTile(msgspec.Struct, frozen=True):
    """The whole image as one tile."""

    grid: tuple[int, ...]  # the same for all images: the tile's size, or a mark that there is no further view (Gemma 3)

    @property
    def pictures(self) -> tuple[int, ...]:
        """The axes of pixel values before that of tiles."""
        return ()

    @property
    def small_grid(self) -> tuple[int, ...]:
        """The grid of an image with the fewest possible tiles."""
        return self.grid

    def num_tiles(self, grid: tuple[int, ...]) -> int:
        """Return the tiles of an image; 0 if the grid is invalid."""
        return int(grid == self.grid)

    def num_embeddings(self, grid: tuple[int, ...], of_tile: int) -> int:
        """Return the embeddings of an image, with `of_tile` for each tile."""
        return of_tile * self.num_tiles(grid)


class TilesThenWhole(msgspec.Struct, frozen=True):
    """Rows and columns of tiles, which are the grid, and then a view of the whole image (Idefics3).

    A small image has only that view: its rows and columns are 0.
    """

    @property
    def pictures(self) -> tuple[int, ...]:
        """As in `OneTile`."""
        return (1,)

    @property
    def small_grid(self) -> tuple[int, ...]:
        """As in `OneTile`."""
        return 0, 0

    def num_tiles(self, grid: tuple[int, ...]) -> int:
        """As in `OneTile`."""
        if len(grid) != 2 or min(grid) < 0 or (grid[0] == 0) != (grid[1] == 0):
            return 0
        return grid[0] * grid[1] + 1

    def num_embeddings(self, grid: tuple[int, ...], of_tile: int) -> int:
        """As in `OneTile`."""
        return of_tile * self.num_tiles(grid)


class WholeThenTiles(msgspec.Struct, frozen=True):
    """A view of the whole image, and then the tiles of the resolution that fits it best (LLaVA-NeXT).

    The tiles' embeddings are joined without padding, and each row ends with a learned vector. The grid is the image's
    size.
    """

    tile: int
    side: int  # embeddings on a side of a tile
    resolutions: tuple[tuple[int, int], ...]  # rows and columns of pixels

    @property
    def pictures(self) -> tuple[int, ...]:
        """As in `OneTile`."""
        return (1,)

    @property
    def small_grid(self) -> tuple[int, ...]:
        """As in `OneTile`."""
        return self.tile, self.tile

    def num_tiles(self, grid: tuple[int, ...]) -> int:
        """As in `OneTile`."""
        if len(grid) != 2 or min(grid) < 1:
            return 0
        rows, columns, _, _ = self.layout(*grid)
        return 1 + rows * columns

    def num_embeddings(self, grid: tuple[int, ...], of_tile: int) -> int:
        """As in `OneTile`."""
        if not self.num_tiles(grid):
            return 0
        _, _, rows, columns = self.layout(*grid)
        return rows * (columns + 1) + of_tile

    def layout(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return rows and columns of tiles for an image of this size, and rows and columns of kept embeddings.

        A very narrow image keeps none.
        """
        best = max(self.resolutions, key=lambda resolution: _merit(height, width, *resolution))
        of_tiles = (best[0] // self.tile, best[1] // self.tile)
        rows, columns = of_tiles[0] * self.side, of_tiles[1] * self.side
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return *of_tiles, rows, columns


TileViews = OneTile | TilesThenWhole | WholeThenTiles


def _merit(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Rate a resolution for an image: first by the pixels that it keeps, then by how few of its own it wastes."""
    scale = min(columns / width, rows / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - rows * columns
