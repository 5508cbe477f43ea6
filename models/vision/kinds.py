"""All kinds of vision towers."""

from penstock.models.vision.foreign import ForeignVision
from penstock.models.vision.grid import GridVision
from penstock.models.vision.patches import PatchVision
from penstock.models.vision.tiles import TileVision

Vision = ForeignVision | GridVision | PatchVision | TileVision
