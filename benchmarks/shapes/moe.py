"""The named workloads of mixtures of experts: routing, permutation, layers. Imports numpy and shapes.py only."""

import dataclasses

import numpy as np

from benchmarks.shapes import by_name, group_sizes, in_proportion


@dataclasses.dataclass(frozen=True)
class RouteShape:
    """T tokens choose k of E experts; with expert groups as in DeepSeek-V3, then by sigmoid scores and a bias."""

    model: str
    T: int
    E: int
    k: int
    expert_groups: int = 1
    top_expert_groups: int = 1

    @property
    def name(self) -> str:
        return f"{self.model}_t{self.T}"

    @property
    def dims(self) -> dict[str, int]:
        return {"T": self.T, "E": self.E, "k": self.k}

    @property
    def options(self) -> dict:
        """Of `jaxops.route`."""
        if self.expert_groups == 1:
            return {}
        return {
            "score": "sigmoid",
            "weight_scale": 2.5,
            "expert_groups": self.expert_groups,
            "top_expert_groups": self.top_expert_groups,
        }

    def moved_bytes(self, pass_name: str) -> int:
        """The fewest bytes of a pass with float32 logits.

        The logits and, for each choice, weight, expert, row and token; the backward adds the logits again, their
        gradient, and each choice's expert and cotangent.
        """
        rows = {"fwd": 1, "fwd+bwd": 3}[pass_name]
        choices = {"fwd": 4, "fwd+bwd": 6}[pass_name]
        return 4 * self.T * (rows * self.E + choices * self.k)


ROUTES = by_name(
    RouteShape("mixtral", 4096, 8, 2),
    RouteShape("qwen3_30b", 4096, 128, 8),
    RouteShape("dsv3", 4096, 256, 8, expert_groups=8, top_expert_groups=4),
    RouteShape("mixtral", 32768, 8, 2),
    RouteShape("qwen3_30b", 32768, 128, 8),
    RouteShape("dsv3", 32768, 256, 8, expert_groups=8, top_expert_groups=4),
)


@dataclasses.dataclass(frozen=True)
class PermuteShape:
    """T tokens of D columns, each sent to k of E experts and back."""

    model: str
    T: int
    D: int
    E: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.model}_t{self.T}"

    @property
    def dims(self) -> dict[str, int]:
        return {"T": self.T, "D": self.D, "E": self.E, "k": self.k}

    def moved_bytes(self, op: str, pass_name: str, itemsize: int = 2) -> int:
        """The fewest bytes of a pass.

        Each row once: a token's rows on both sides, and of each choice its position, weight and gradient.
        """
        token, choice, numbers = {
            ("permute", "fwd"): (1, 1, 1),
            ("permute", "bwd"): (1, 1, 1),
            ("combine", "fwd"): (1, 1, 2),
            ("combine", "bwd"): (1, 2, 3),
        }[op, pass_name]
        return self.T * (itemsize * self.D * (token + choice * self.k) + 4 * numbers * self.k)


PERMUTES = by_name(
    PermuteShape("qwen3_30b", 32768, 2048, 128, 8),
    PermuteShape("qwen3_30b", 4096, 2048, 128, 8),
    PermuteShape("mixtral", 16384, 4096, 8, 2),
)

ROUTERS = PERMUTES | {"dsv3_t32768": PermuteShape("dsv3", 32768, 7168, 256, 8)}


@dataclasses.dataclass(frozen=True)
class MoeShape:
    """T tokens of width D, each through k of E gated units of width F.

    form: "gpt_oss" for its clamped units with biases, "joined" for the weights of gate and up in one array.
    """

    name: str
    T: int
    E: int
    k: int
    D: int
    F: int
    form: str = ""

    @property
    def dims(self) -> dict[str, int]:
        return {"T": self.T, "E": self.E, "k": self.k, "D": self.D, "F": self.F}

    def flops(self, pass_name: str) -> int:
        """Of the routed rows' products: gate, up and down; the backward has two more of each."""
        return {"fwd": 1, "fwd+bwd": 3}[pass_name] * 3 * 2 * self.T * self.k * self.D * self.F


def preferences(dist: str, shape: MoeShape) -> np.ndarray:
    """float32 [T, E], added to the router's logits.

    Zeros for "router": groups as random logits fill them. Otherwise each token's k experts get more than any logit, so
    that groups have the sizes of `group_sizes`, limited to T; the excess goes to the other nonempty groups.
    """
    T, E, k = shape.T, shape.E, shape.k
    found = np.zeros((T, E), np.float32)
    if dist == "router":
        return found
    sizes = group_sizes(dist, E, T * k)
    while over := int(np.sum(np.maximum(sizes - T, 0))):
        free = np.flatnonzero((sizes > 0) & (sizes < T))
        sizes = np.minimum(sizes, T)
        sizes[free] += in_proportion(sizes[free].astype(float), over)
    # Dealt round-robin: an expert's rows are contiguous, and a token's are T apart, so that its experts differ.
    experts = np.repeat(np.arange(E), sizes).reshape(k, T)
    found[np.random.default_rng(0).permutation(T)[None, :], experts] = 1e3
    return found


MOES = by_name(
    MoeShape("qwen3_30b_t4096", 4096, 128, 8, 2048, 768),
    MoeShape("qwen3_30b_t32768", 32768, 128, 8, 2048, 768),
    MoeShape("mixtral_t16384", 16384, 8, 2, 4096, 14336),
    MoeShape("moe_3b_t16384", 16384, 64, 8, 2048, 512),  # a layer of the training benchmark's preset
    MoeShape("sonicmoe_t16384", 16384, 64, 4, 2560, 1280),  # SonicMoE publishes 8.45 ms fwd+bwd on an H100
    MoeShape("gpt_oss_120b_biased_t8192", 8192, 128, 4, 2880, 2880, "gpt_oss"),
    MoeShape("qwen3_30b_joined_t32768", 32768, 128, 8, 2048, 768, "joined"),
)
