"""The one objective: InfoNCE with masked, banded and tilted negatives."""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hardneg.losses import candidates, combine, rules, settings
from hardneg.losses.diagnostics import Diagnostics, answer_of_pairs
from hardneg.losses.hardening import Hardening, Uniform
from hardneg.losses.inputs import check_negatives, check_use, check_views, half, read
from hardneg.losses.kernels import PLAIN, Eligibility, Kernel, PairLoss, choose
from hardneg.losses.kernels.interface import GuardedLoss
from hardneg.losses.schedules import Adaptive, Setting, value
from hardneg.losses.settings import Adjustable, Settings
from hardneg.losses.temperature import Learnable


class InfoNCE(Adjustable):
    """InfoNCE over a negative distribution ``q ∝ mask · band · tilt``: every method of the field in one module.

    For an anchor with positives of score p and candidates of score s = cos/temperature it computes
    ``mean log(1 + Q·G·e^{−p})``, where G is the expectation of e^s under q, corrected for the class prior.

    Args:
        temperature: number > 0, schedule, or `Learnable`
        hardening: one `Hardening` or a tuple of them: at most one tilt, any number of bands, which intersect
        class_prior: τ⁺, chance that a random sample shares the anchor's class, in [0, 1); 0 turns debiasing off
        debias: ``"hcl"`` (the paper's formula) or ``"exact"`` (the tilted share of the anchor's class)
        in_batch: candidates from ``"both"`` views (2B−2), the ``"other"`` view (B−1), or None of the batch
        symmetric: with ``"other"``: the second view's rows are anchors too
        supervision: what labels are used for: ``"none"``, ``"positives"``, ``"negatives"`` or ``"full"``
        combine_positives: ``"mean_of_logs"``, ``"log_of_mean"`` or ``"in_denominator"``
        average: over ``"anchors"``, or over all ``"pairs"`` of anchor and positive
        negative_count: Q: the ``"support"`` size, all candidates of the ``"batch"``, or a number
        positive_in_denominator: False gives the decoupled form log(Q·G) − p
        num_negatives: k negatives drawn per anchor, uniformly with replacement from its support
        weight_range: scores are rescaled to [−weight_range, weight_range] for the weights; for unnormalised embeddings
        grad_through_weights: False treats the weights as constants
        normalize: bring embeddings to unit length
        gather: candidates from all processes; every process returns the global loss, and the average of the
            processes' gradients (what DDP takes) is exactly the gradient of it
        backend: ``"reference"`` (plain PyTorch, any setting), ``"tiled"`` (memory linear in the batch), ``"fused"``
            (Triton, on CUDA devices) or ``"auto"``: fused on a GPU, else tiled; reference where only that will do
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (one loss per anchor: z1's, then z2's where they are anchors)
        generator: gives the seed of the draws of ``num_negatives``, once, when the loss is made (None: PyTorch's own
            generator does). Each call draws by that seed and a counter of calls; both are in ``state_dict()``

    Every setting may be assigned later, ``loss.class_prior = 0.1``; it is checked as here and holds from the next call.
    Gradients can be differentiated again (``create_graph=True``); that takes memory for whole score matrices.

    Examples:
        >>> import torch, hardneg as hn
        >>> loss = hn.InfoNCE(temperature=0.5, hardening=hn.Exponential(1.0), class_prior=0.1)
        >>> z1, z2 = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)
        >>> loss(z1, z2).backward()
        >>> z1.grad.shape
        torch.Size([32, 64])
    """

    draw_state: Tensor  # (2,), the seed and how many calls have drawn; only if num_negatives is given

    def __init__(
        self,
        temperature: Setting | Learnable = 0.5,
        hardening: Hardening | tuple[Hardening, ...] = Uniform(),  # noqa: B008  # frozen
        class_prior: Setting = 0.0,
        debias: str = "hcl",
        in_batch: str | None = "both",
        symmetric: bool = False,
        supervision: str = "none",
        combine_positives: str = "mean_of_logs",
        average: str = "anchors",
        negative_count: str | float = "support",
        positive_in_denominator: bool = True,
        num_negatives: int | None = None,
        weight_range: float | None = None,
        grad_through_weights: bool = True,
        normalize: bool = True,
        gather: bool = False,
        backend: str = "auto",
        reduction: str = "mean",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.progress = 0.0
        self._last: Callable[[], Diagnostics] | None = None  # evaluated only when diagnostics() asks
        self._warned = False
        self._settings: Settings  # as the schedules have it now
        self._moves = False  # does an adaptive schedule move without set_progress?
        self._seeded_by: torch.Generator | None = None
        self.temperature = temperature
        self.hardening = hardening if isinstance(hardening, tuple) else (hardening,)
        self.class_prior = class_prior
        self.debias = debias
        self.in_batch = in_batch
        self.symmetric = symmetric
        self.supervision = supervision
        self.combine_positives = combine_positives
        self.average = average
        self.negative_count = negative_count
        self.positive_in_denominator = positive_in_denominator
        self.num_negatives = num_negatives
        self.weight_range = weight_range
        self.grad_through_weights = grad_through_weights
        self.normalize = normalize
        self.gather = gather
        self.backend = backend
        self.reduction = reduction
        self.generator = generator
        self._settle()

    def forward(
        self,
        z1: Tensor,
        z2: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        negatives: Tensor | None = None,
        exclude: Tensor | None = None,
        negative_labels: Tensor | None = None,
        negative_mask: Tensor | None = None,
        positive_mask: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch.

        z1: (B, d) · z2: (B, d), or (B, M, d) for M positives of anchors z1; None if positives are found by label ·
        labels: (B,) integers, −1 = unknown · negatives: (N, d) shared or (B, N, d) per anchor, added to the candidates
        in the batch · exclude: (B,) or (B, E) indices into negatives · negative_labels: (N,) or (B, N) ·
        negative_mask: (B, N) bool, True = may be a negative; row i serves both views of i · positive_mask: (B, M)
        bool, for z2 (B, M, d) that is padded: True = is a positive
        """
        if self.backend == "fused" and torch.compiler.is_compiling():
            from hardneg.losses.kernels.triton.operators import uncompiled

            return uncompiled(  # type: ignore[no-any-return]
                self.forward, z1, z2, labels=labels, negatives=negatives, exclude=exclude,
                negative_labels=negative_labels, negative_mask=negative_mask, positive_mask=positive_mask,
            )  # fmt: skip
        check_use(self.supervision, self.in_batch, self.symmetric, z2, labels, negatives, negative_labels)
        if positive_mask is not None and (self.in_batch is not None or self.supervision in ("positives", "full")):
            raise ValueError(
                "positive_mask is for given positives and given negatives: set in_batch=None and take no positives "
                f"from labels, got in_batch={self.in_batch!r}, supervision={self.supervision!r}"
            )
        if self._moves:
            self.set_progress(self.progress)
        now, key = self._settings, self._next_key()
        tensors = (z1, z2, labels, negatives, exclude, negative_labels, negative_mask, positive_mask)
        device = z1.device if isinstance(z1, Tensor) else torch.device("cpu")
        compiling = torch.compiler.is_compiling()
        with _plainly(device), _current(device):  # float32 arithmetic inside, always
            kernel = self._kernel(device)
            if kernel.pair_loss is not None and settings.is_plain(now, z1, z2, *tensors[3:]):
                return self._pair_loss(kernel.pair_loss, z1, z2, negatives, exclude, negative_mask)  # type: ignore[arg-type]
            inputs = read(*tensors, normalize=now.normalize, kernel=kernel)
            scale = rules.scale_of(now, inputs.views, inputs.views.dtype)
            loss, record = combine.loss_of(now, inputs, scale, kernel, key)
        self.__dict__["_last"] = lambda: record
        if now.prior is not None and scale.device.type == "cpu" and not (self._warned or compiling):
            self._warn_if_floored(**{name: float(count) for name, count in record.floored().items()}, stacklevel=5)
        if loss.requires_grad and not compiling and not torch._C._are_functorch_transforms_active():
            plain = None if kernel is PLAIN else partial(combine.plain_loss, now, key)
            loss = GuardedLoss.apply(loss, plain, scale, *tensors)  # type: ignore[no-untyped-call]
        return loss

    def check_device(self, device: torch.device) -> None:
        """Raise if its backend cannot run on this device."""
        self._kernel(device)

    def set_progress(self, fraction: float) -> None:
        """Move all schedules to the fraction of training done, in [0, 1]."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be in [0, 1], got {fraction!r}: pass steps done / steps in all")
        # Schedules become plain numbers here, checked, and outside of any compiled graph.
        self._settings = settings.resolve(self._given(), fraction)
        self.__dict__["progress"] = float(fraction)

    def observe(self, *, accuracy: float | None = None, loss: float | None = None) -> None:
        """Tell adaptive schedules how training goes: those that want more take the accuracy, the others the loss.

        accuracy: on validation, after an epoch · loss: of training, after a step
        """
        for schedule in settings.adaptive(self._given()):
            reading = accuracy if schedule.better == "higher" else loss
            if reading is not None:
                schedule.update(reading)

    @property
    def observes_loss(self) -> bool:
        """Whether an adaptive schedule wants to be told the loss of every step."""
        return any(schedule.better == "lower" for schedule in settings.adaptive(self._given()))

    @property
    def accuracy_schedules(self) -> tuple[Adaptive, ...]:
        """The adaptive schedules that observe a validation accuracy."""
        return tuple(schedule for schedule in settings.adaptive(self._given()) if schedule.better == "higher")

    def diagnostics(self) -> dict[str, float]:
        """What the negatives of the last call were; see `hardneg.losses.diagnostics.Diagnostics`."""
        if self._last is None:
            raise RuntimeError("diagnostics() describes the last call, and there has been none: call the loss first")
        report = self._last().read()
        self._warn_if_floored(report["floored"], report["anchors"], stacklevel=3)
        return report

    def get_extra_state(self) -> Tensor:
        """Progress and the memory of adaptive schedules, as one tensor, so that any checkpoint format can hold it."""
        numbers = [self.progress]
        for schedule in settings.adaptive(self._given()):
            state = schedule.state()
            numbers += [float(len(state)), *state]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take back what `get_extra_state` gave."""
        progress, *rest = state.tolist()
        for schedule in settings.adaptive(self._given()):
            if not rest:
                raise ValueError(
                    "the state has no memory of an Adaptive schedule, but this loss has one: was it saved by another?"
                )
            size = int(rest[0])
            schedule.load_state(rest[1 : 1 + size])
            rest = rest[1 + size :]
        self.set_progress(progress)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}  # a copy describes no call yet

    def extra_repr(self) -> str:
        shown = ("hardening", "class_prior", "in_batch", "supervision", "negative_count", "reduction", "backend")
        first = [] if isinstance(self.temperature, Learnable) else [f"temperature={self.temperature!r}"]
        return ", ".join(first + [f"{name}={getattr(self, name)!r}" for name in shown])

    def _settle(self) -> None:
        if not isinstance(self.hardening, tuple):
            self.__dict__["hardening"] = (self.hardening,)
        given = self._given()
        settings.check(given)
        resolved = settings.resolve(given, self.progress)
        self._kernel()  # a backend that cannot run these settings is refused now
        self._settings, self._settled = resolved, True
        self._moves = any(True for _ in settings.adaptive(given))
        if self.num_negatives is None:
            self._buffers.pop("draw_state", None)
        elif "draw_state" not in self._buffers or self.generator is not self._seeded_by:
            device = torch.device("cpu") if self.generator is None else self.generator.device
            with torch.inference_mode(False):  # training could not advance an inference tensor
                seed = int(torch.randint(1 << 48, (), generator=self.generator, device=device))
                self.register_buffer("draw_state", torch.tensor([seed, 0]))
            self._seeded_by = self.generator

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.SETTINGS}

    def _next_key(self) -> Tensor | None:
        """The key of this call's draws, (2,), if some are drawn."""
        if self.num_negatives is None:
            return None
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "the loss is computed again in a backward pass, where num_negatives would draw others: leave the loss "
                "outside of torch.utils.checkpoint"
            )
        key: Tensor = self.draw_state.clone()
        self.draw_state[1] += 1
        return key

    def _pair_loss(
        self,
        pair_loss: PairLoss,
        z1: Tensor,
        z2: Tensor,
        negatives: Tensor | None,
        exclude: Tensor | None,
        negative_mask: Tensor | None,
    ) -> Tensor:
        now = self._settings
        check_views(z1, z2)
        batch, dim = z1.shape
        if negatives is None:
            eligibility = candidates.of_pairs(batch, now.in_batch, now.symmetric, z1.device)
        else:
            exclude, _ = check_negatives(batch, dim, negatives, exclude, None, negative_mask)
            eligibility = Eligibility(len(negatives), excluded=exclude, allowed=negative_mask)
        device = z1.device
        given = (("z2", z2), ("negatives", negatives), ("exclude", exclude), ("negative_mask", negative_mask))
        for name, tensor in given:
            if tensor is not None and tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, but z1 on {device}: move all inputs to one device")
        scale = rules.scale_of(now, z1, torch.float32)
        rule = rules.banded(now, rules.weights_of(now, [], scale, half(z1, z2)), None, None, scale)
        if isinstance(now.negative_count, str):  # of one pair there are none, whatever their number is said to be
            log_number = None if now.negative_count == "support" else math.log(max(eligibility.count_per_anchor, 1))
        else:
            log_number = math.log(now.negative_count)
        loss, seen = pair_loss(
            z1,
            z2,
            negatives,
            eligibility,
            scale,
            rule,
            log_number,
            None if now.prior is None else (now.prior.log, now.prior.log_rest),
            not now.positive_in_denominator,
            now.reduction,
            partial(_plain_pair_loss, now, exclude, negative_mask),
        )
        scale = scale.detach()
        # Directly: a module would look through its parameters, buffers and children first.
        self.__dict__["_last"] = lambda: Diagnostics([answer_of_pairs(seen())], scale)
        if now.prior is not None and scale.device.type == "cpu" and not self._warned:
            self._warn_if_floored(float(seen().floored.sum()), float((seen().count > 0).sum()), stacklevel=6)
        return loss

    def _kernel(self, device: torch.device | None = None) -> Kernel:
        general = any(part.has_general_weights for part in self.hardening)
        return choose(self.backend, general_weights=general, device=device)

    def _warn_if_floored(self, floored: float, anchors: float, stacklevel: int) -> None:
        if floored > anchors / 2 and not self._warned:
            self._warned = True
            prior = value(self.class_prior, self.progress)
            warnings.warn(
                f"{floored:.0f} of {anchors:.0f} anchors are floored: debiasing with class_prior={prior:g} takes away "
                "all of their negatives, which then get no gradient. Lower class_prior (0 turns debiasing off) or "
                "raise the temperature; diagnostics()['floored'] counts them.",
                stacklevel=stacklevel,  # the line that called the loss
            )


def _plainly(device: torch.device) -> AbstractContextManager[Any]:
    """Turns autocast off; where it is off already, in a tenth of the time."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one: Triton runs its programs there, wherever the tensors are."""
    if device.type != "cuda" or torch.compiler.is_compiling() or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _plain_pair_loss(
    now: Settings,
    exclude: Tensor | None,
    negative_mask: Tensor | None,
    z1: Tensor,
    z2: Tensor,
    negatives: Tensor | None,
    scale: Tensor,
) -> Tensor:
    """As `combine.plain_loss`, with what a pair loss is differentiable in last."""
    return combine.plain_loss(now, None, scale, z1, z2, None, negatives, exclude, None, negative_mask, None)
