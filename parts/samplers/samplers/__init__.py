"""The samplers, a file each. A file uses torch's tensors without importing torch, as frontends read its parameters."""

from penstock.parts.samplers.samplers.cutoffs import EpsilonCutoff, EtaCutoff
from penstock.parts.samplers.samplers.dry import Dry
from penstock.parts.samplers.samplers.dynatemp import DynamicTemperature
from penstock.parts.samplers.samplers.logit_bias import LogitBias
from penstock.parts.samplers.samplers.min_p import MinP
from penstock.parts.samplers.samplers.mirostat import Mirostat
from penstock.parts.samplers.samplers.penalties import Penalties
from penstock.parts.samplers.samplers.smoothing import Smoothing
from penstock.parts.samplers.samplers.temperature import Temperature
from penstock.parts.samplers.samplers.top_k import TopK
from penstock.parts.samplers.samplers.top_n_sigma import TopNSigma
from penstock.parts.samplers.samplers.top_p import TopP
from penstock.parts.samplers.samplers.typical import Typical
from penstock.parts.samplers.samplers.xtc import Xtc

PARTS = (
    LogitBias, Penalties, Dry, TopNSigma, Temperature, DynamicTemperature, Smoothing, MinP, TopK, TopP, Typical,
    EpsilonCutoff, EtaCutoff, Xtc, Mirostat,
)  # fmt: skip
"""In the order in which they are applied, unless a request says otherwise."""
