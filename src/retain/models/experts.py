"""Mixtures of experts as a layer: the router's scores, then the experts that they choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from retain.kernels import ops
from retain.kernels.experts import Experts, Router
from retain.kernels.ops import Buffer, Operation
from retain.kernels.weights.weight import concat_rows
from retain.models.layers import Layer, Linear, resolve_activation
from retain.models.llama_like import load_mlp
from retain.models.weights import Weights


@dataclass(frozen=True, eq=False)
class MixtureOfExperts:
    """Compute the sum of the experts that the scores of a linear layer choose, in place of an MLP.

    Experts may read and write latent vectors (LatentMoE): a linear layer makes them of x, and one makes E of their sum.
    """

    gate: Linear  # [n, E]: the scores
    experts: Experts
    latent: tuple[Linear, Linear] | None = None  # the linear layers before the experts, and behind them

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        n = self.experts.num_experts
        scores = Buffer(f"scores {n}", n)
        yield from self.gate.emit(x, scores)
        if not self.latent:
            yield ops.MixExperts(x, scores, out, self.experts, add)
            return
        before, behind = self.latent
        size = before.weight.shape[0]
        latent, total = (Buffer(f"{name} {size}", size) for name in ("latent", "sum of experts"))
        yield from before.emit(x, latent)
        yield ops.MixExperts(latent, scores, total, self.experts)
        yield from behind.emit(total, out, add)


@dataclass(frozen=True, eq=False)
class SharedExpertMixture:
    """Compute the sum of a mixture of experts and of what all tokens pass: an expert with a gate, or an MLP."""

    mixture: MixtureOfExperts
    shared: Layer

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        yield from self.mixture.emit(x, out, add)
        yield from self.shared.emit(x, out, add=True)


def load_shared_expert(w: Weights, act: str) -> MixtureOfExperts:
    """Load the expert of all tokens from shared_expert, and its score from shared_expert_gate."""
    gate, up, down = (w.load_matrix(f"shared_expert.{name}.weight") for name in EXPERT_NAMES)
    router = Router(top_k=1, is_sigmoid=True, normalize=False)
    experts = Experts(1, concat_rows((gate, up)), down, router, resolve_activation(act))
    return MixtureOfExperts(load_gate(w, "shared_expert_gate"), experts)


ExpertNames = tuple[str, str, str]  # of the gate, the up and the down projection
EXPERT_NAMES: ExpertNames = ("gate_proj", "up_proj", "down_proj")


def load_gate(w: Weights, name: str = "gate") -> Linear:
    """Load the linear layer of a router's scores, in float32."""
    return Linear(w[f"{name}.weight"].to(torch.float32))


def load_mixture(
    w: Weights, num_experts: int, router: Router, act: str, names: ExpertNames = EXPERT_NAMES
) -> MixtureOfExperts:
    """Load the experts of a layer (see load_experts), and the scores of their router."""
    return MixtureOfExperts(load_gate(w), load_experts(w, num_experts, router, act, names))


def has_experts(c: Mapping[str, Any], i: int) -> bool:
    """Return whether layer i of Qwen has experts; the others have an MLP."""
    is_sparse = c["num_experts"] > 0 and (i + 1) % c["decoder_sparse_step"] == 0
    return is_sparse and i not in (c["mlp_only_layers"] or ())


def load_softmax_mixture(w: Weights, normalize: bool) -> MixtureOfExperts:
    """Load Qwen's experts of a layer. Weights of experts add up to 1 if `normalize`."""
    c = w.config
    return load_mixture(w, c["num_experts"], Router(c["num_experts_per_tok"], normalize=normalize), c["hidden_act"])


def load_sigmoid_router(w: Weights) -> Router:
    """Load DeepSeek-V3's router of a layer. The bias of scores only chooses."""
    c = w.config
    return Router(
        c["num_experts_per_tok"],
        is_sigmoid=True,
        normalize=c["norm_topk_prob"],
        scale=c["routed_scaling_factor"],
        bias=w["gate.e_score_correction_bias"].float(),
        num_groups=c["n_group"],
        top_groups=c["topk_group"],
    )


def load_shared_mixture(w: Weights, router: Router, bias: bool = False) -> SharedExpertMixture:
    """Load DeepSeek's experts of a layer, and those of all tokens, which are one MLP."""
    mixture = load_mixture(w, w.config["n_routed_experts"], router, w.config["hidden_act"])
    return SharedExpertMixture(mixture, load_mlp(w.scope("shared_experts."), bias))


def load_experts(w: Weights, num_experts: int, router: Router, act: str, names: ExpertNames = EXPERT_NAMES) -> Experts:
    """Load experts without biases: one by one, by these names, or stacked in one tensor of a layer."""
    act = resolve_activation(act)
    if "experts.gate_up_proj" not in w:
        return load_single_experts(w, num_experts, router, act, names=names)
    gate_up = w.load_stack("experts.gate_up_proj", num_experts)
    down = w.load_stack("experts.down_proj", num_experts)
    return Experts(num_experts, gate_up, down, router, act)


def load_single_experts(
    w: Weights, num_experts: int, router: Router, act: str, bias: bool = False, names: ExpertNames = EXPERT_NAMES
) -> Experts:
    """Load the experts of a layer, each from three matrices in experts.<e>."""
    gate, up, down = names
    own = [w.scope(f"experts.{e}.") for e in range(num_experts)]
    gates_and_ups = [x.load_matrix(f"{name}.weight") for x in own for name in (gate, up)]
    downs = [x.load_matrix(f"{down}.weight") for x in own]
    for matrices in (gates_and_ups, downs):
        if len(shapes := {tuple(m.shape) for m in matrices}) > 1:
            raise ValueError(f"experts of a layer have the shapes {sorted(shapes)}, not one shape")
    gate_up = concat_rows(gates_and_ups)
    experts = Experts(num_experts, gate_up, concat_rows(downs), router, act)
    if not bias:
        return experts
    gate_up_bias = torch.cat([x[f"{name}.bias"] for x in own for name in (gate, up)])
    return replace(experts, gate_up_bias=gate_up_bias, down_bias=torch.cat([x[f"{down}.bias"] for x in own]))
