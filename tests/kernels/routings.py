"""The ways in which published mixtures choose experts."""

from penstock.kernels.experts.routing import Routing

ROUTINGS = {
    "softmax": Routing(top_k=4),
    "softmax, renormalized": Routing(top_k=2, renormalize=True),
    "softmax, groups": Routing(top_k=3, num_groups=4, top_groups=2, group_judge="max", scale=16.0),
    "softmax, corrected": Routing(top_k=3, renormalize=True, renormalize_eps=1e-12),
    "sigmoid": Routing(top_k=1, kind="sigmoid"),
    "sigmoid, corrected": Routing(top_k=4, kind="sigmoid", renormalize=True),
    "sigmoid, groups, corrected": Routing(
        top_k=5, kind="sigmoid", renormalize=True, renormalize_eps=1e-20, num_groups=3, top_groups=2, scale=2.5
    ),
    "sigmoid, groups": Routing(top_k=3, kind="sigmoid", num_groups=2, top_groups=1),
    "top_softmax": Routing(top_k=4, kind="top_softmax"),
    "top_softmax of all": Routing(top_k=12, kind="top_softmax", scale=0.5),
}
"""For 12 experts or a multiple of it; those whose names say so want a correction."""
