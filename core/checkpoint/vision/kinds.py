"""All kinds of vision towers."""

from penstock.core.checkpoint.vision.grid import GridVision
from penstock.core.checkpoint.vision.patches import PatchVision
from penstock.core.checkpoint.vision.tiles import TileVision

Vision = GridVision | PatchVision | TileVision
