"""What a tower for tiles sees of a picture: one tile, or several, and which of their embeddings are kept."""

import msgspec


class OneTile(msgspec.Struct, frozen=True):
    """The whole picture as one tile."""

    grid: tuple[int, ...]  # of all: the tile's size, or that there is no further view (Gemma 3)

    @property
    def pictures(self) -> tuple[int, ...]:
        """How pixel values begin, before the tiles."""
        return ()

    @property
    def small_grid(self) -> tuple[int, ...]:
        """Of a picture that has as few tiles as one can have."""
        return self.grid

    def num_tiles(self, grid: tuple[int, ...]) -> int:
        """Of a picture; 0 if there is no such picture."""
        return int(grid == self.grid)

    def num_embeddings(self, grid: tuple[int, ...], of_tile: int) -> int:
        """Of a picture, with so many for each tile."""
        return of_tile * self.num_tiles(grid)


class TilesThenWhole(msgspec.Struct, frozen=True):
    """Rows and columns of tiles, which are the grid, and behind them a view of the whole (Idefics3). A small picture is
    that view alone: its rows and columns are 0."""

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
    """A view of the whole, and behind it the tiles of the resolution that fits the picture best (LLaVA-NeXT). Their
    embeddings are put together again without what the picture was padded with, each row with a learned end. The grid
    is the picture's size."""

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
        """Rows and columns of tiles for a picture of this size; rows and columns of their embeddings that are kept.

        Of a very narrow picture these are none.
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
    """Of a resolution for a picture: how many of its pixels it keeps; then, how few of its own it wastes."""
    scale = min(columns / width, rows / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - rows * columns
