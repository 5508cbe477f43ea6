"""All kinds of vision towers."""

from penstock.models.vision.grid import GridVision
from penstock.models.vision.patches import PatchVision
from penstock.models.vision.tiles import TileVision

Vision = GridVision | PatchVision | TileVision
