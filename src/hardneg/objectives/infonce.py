"""The one objective: InfoNCE with masked, banded and tilted negatives."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from hardneg import checks, distributed
from hardneg.hardening import Hardening, Uniform
from hardneg.objectives import meetings, rules, settings
from hardneg.objectives.debiasing import Prior, log_expected_negative
from hardneg.objectives.diagnostics import Answer, Diagnostics, answer_of_pairs
from hardneg.objectives.inputs import Inputs, check_negatives, check_use, check_views, half, read
from hardneg.objectives.kernels import (
    Eligibility,
    Kernel,
    LogSums,
    Losses,
    Lowered,
    PairLoss,
    Rule,
    choose,
)
from hardneg.objectives.kernels.problem import EXACT_SOFTPLUS, constant
from hardneg.objectives.meetings import Meeting
from hardneg.objectives.positives import Given, Grouped, Positives
from hardneg.schedules import Adaptive, Schedule, Setting, value
from hardneg.temperature import Learnable


class InfoNCE(nn.Module):
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
        generator: of the draws of ``num_negatives``

    Examples:
        >>> import torch, hardneg as hn
        >>> loss = hn.InfoNCE(temperature=0.5, hardening=hn.Exponential(1.0), class_prior=0.1)
        >>> z1, z2 = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)
        >>> loss(z1, z2).backward()
        >>> z1.grad.shape
        torch.Size([32, 64])
    """

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
        settings.check(self)
        self._last: Callable[[], Diagnostics] | None = None  # asked only if somebody wants to know
        self._warned = False
        self._hardening: tuple[Hardening, ...]  # as the schedules have it now
        self._prior: Prior | None
        self._moves = any(True for _ in self._adaptive())  # without set_progress
        self.set_progress(0.0)
        self._kernel()  # a backend that cannot run these settings is refused now

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
            from hardneg.objectives.kernels.fused import uncompiled

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
        device = z1.device if isinstance(z1, Tensor) else torch.device("cpu")
        with _plainly(device), _current(device):  # float32 arithmetic inside, always
            kernel = self._kernel(device)
            given = (negatives, exclude, negative_labels, negative_mask, positive_mask)
            if kernel.pair_loss is not None and settings.is_plain(self, z1, z2, *given):
                return self._pair_loss(kernel.pair_loss, z1, z2, negatives, exclude, negative_mask)  # type: ignore[arg-type]
            loss = self._loss(read(z1, z2, labels, *given, normalize=self.normalize, kernel=kernel), kernel)
        if negatives is not None and loss.requires_grad and not torch.compiler.is_compiling():
            loss = _Guard.apply(loss, negatives)  # type: ignore[no-untyped-call]
        return loss

    def check_device(self, device: torch.device) -> None:
        """Raise if its backend cannot run on this device."""
        self._kernel(device)

    def set_progress(self, fraction: float) -> None:
        """Move all schedules to the fraction of training done, in [0, 1]."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be in [0, 1], got {fraction!r}: pass steps done / steps in all")
        self.progress = float(fraction)
        # Schedules become plain numbers here, checked, and outside of any compiled graph.
        checks.number("class_prior", prior := value(self.class_prior, fraction), at_least=0, below=1)
        if not isinstance(self.temperature, Learnable):
            checks.number("temperature", value(self.temperature, fraction), above=0, below=math.inf)
        self._hardening = tuple(part.at(fraction) for part in self.hardening)
        self._prior = Prior.of(prior) if prior > 0 else None

    def observe(self, *, accuracy: float | None = None, loss: float | None = None) -> None:
        """Tell adaptive schedules how training goes: those that want more take the accuracy, the others the loss.

        accuracy: on validation, after an epoch · loss: of training, after a step
        """
        for schedule in self._adaptive():
            reading = accuracy if schedule.better == "higher" else loss
            if reading is not None:
                schedule.update(reading)

    @property
    def is_debiased(self) -> bool:
        """Is there a class prior at this moment of training?"""
        return self._prior is not None

    @property
    def observes_loss(self) -> bool:
        """Whether an adaptive schedule wants to be told the loss of every step."""
        return any(schedule.better == "lower" for schedule in self._adaptive())

    @property
    def accuracy_schedules(self) -> tuple[Adaptive, ...]:
        """The adaptive schedules that observe a validation accuracy."""
        return tuple(schedule for schedule in self._adaptive() if schedule.better == "higher")

    def diagnostics(self) -> dict[str, float]:
        """What the negatives of the last call were; see `hardneg.objectives.diagnostics.Diagnostics`."""
        if self._last is None:
            raise RuntimeError("diagnostics() describes the last call, and there has been none: call the loss first")
        report = self._last().read()
        self._warn_if_floored(report["floored"], report["anchors"])
        return report

    def get_extra_state(self) -> Tensor:
        """Progress and the memory of adaptive schedules, as one tensor, so that any checkpoint format can hold it."""
        numbers = [self.progress]
        for schedule in self._adaptive():
            state = schedule.state()
            numbers += [float(len(state)), *state]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take back what `get_extra_state` gave."""
        progress, *rest = state.tolist()
        for schedule in self._adaptive():
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

    def _loss(self, inputs: Inputs, kernel: Kernel) -> Tensor:
        scale = rules.scale_of(self, inputs.views, inputs.views.dtype)
        arranged = meetings.arrange(
            inputs,
            in_batch=self.in_batch,
            symmetric=self.symmetric,
            supervision=self.supervision,
            gather=self.gather,
        )
        weights = rules.weights_of(self, arranged, scale, inputs.precision if kernel.units is not None else None)
        if not self.normalize:
            # Rescaled weights cannot overflow.
            meetings.check_range(arranged, scale, weights.tilt if self.weight_range is None else 0.0)
        answers = [self._answer(meeting, scale, weights, kernel) for meeting in arranged]
        record = Diagnostics(answers, scale.detach())
        self._last = lambda: record
        weights.lowered.forget()
        if (
            self._prior is not None
            and scale.device.type == "cpu"
            and not (self._warned or torch.compiler.is_compiling())
        ):
            self._warn_if_floored(**{name: float(count) for name, count in record.floored().items()})
        return self._reduced(
            _joined([answer.losses for answer in answers]),
            _joined([answer.valid for answer in answers]),
            _joined([answer.positive_count for answer in answers]),
        )

    def _pair_loss(
        self,
        pair_loss: PairLoss,
        z1: Tensor,
        z2: Tensor,
        negatives: Tensor | None,
        exclude: Tensor | None,
        negative_mask: Tensor | None,
    ) -> Tensor:
        check_views(z1, z2)
        batch, dim = z1.shape
        if negatives is None:
            who = meetings.of_pairs(batch, self.in_batch, self.symmetric, z1.device)
        else:
            exclude, _ = check_negatives(batch, dim, negatives, exclude, None, negative_mask)
            who = Eligibility(len(negatives), excluded=exclude, allowed=negative_mask)
        device = z1.device
        given = (("z2", z2), ("negatives", negatives), ("exclude", exclude), ("negative_mask", negative_mask))
        for name, tensor in given:
            if tensor is not None and tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, but z1 on {device}: move all inputs to one device")
        scale = rules.scale_of(self, z1, torch.float32)
        rule = rules.banded(self, rules.weights_of(self, [], scale, half(z1, z2)), None, None, scale)
        if isinstance(self.negative_count, str):  # of one pair there are none, whatever their number is said to be
            log_number = None if self.negative_count == "support" else math.log(max(who.number, 1))
        else:
            log_number = math.log(self.negative_count)
        loss, seen = pair_loss(
            z1,
            z2,
            negatives,
            who,
            scale,
            rule,
            log_number,
            None if self._prior is None else (self._prior.log, self._prior.log_rest),
            not self.positive_in_denominator,
            self.reduction,
        )
        scale = scale.detach()
        # Directly: a module would look through its parameters, buffers and children first.
        self.__dict__["_last"] = lambda: Diagnostics([answer_of_pairs(seen())], scale)
        if self._prior is not None and scale.device.type == "cpu" and not self._warned:
            self._warn_if_floored(float(seen().floored.sum()), float((seen().count > 0).sum()))
        return loss

    def _answer(self, meeting: Meeting, scale: Tensor, weights: Rule, kernel: Kernel) -> Answer:
        """The losses of one meeting's anchors."""
        if kernel.losses is not None and self._is_simple(meeting, scale):
            return self._simple_answer(meeting, scale, weights, kernel, kernel.losses)
        positives: Positives
        if meeting.similarity is not None:
            positives = Given(meeting.similarity * scale, meeting.real)
        else:
            positives = Grouped(meeting.anchors, meeting.pool, scale, meeting.friends, kernel, weights.lowered)
        positive_count = positives.count()
        best = positives.best() if any(part.needs_positive for part in self._hardening) else None
        rule = rules.banded(self, weights, best, meeting, scale)
        negatives = self._negatives(meeting, scale, rule, kernel)
        if self._prior is not None:
            least = -scale if self.normalize else scale.new_full((), math.log(torch.finfo(scale.dtype).tiny))
            log_g, floored = log_expected_negative(
                negatives, positives.sums(weights), positive_count, self._prior, self.debias, least
            )
        else:
            log_g, floored = negatives.mean, torch.zeros_like(negatives.count, dtype=torch.bool)

        valid = (negatives.count > 0) & (positive_count > 0)
        log_total = torch.where(valid, self._log_number(negatives, meeting) + log_g, 0.0)  # log(Q·G)
        losses = torch.where(valid, self._combined(positives, log_total, weights.lowered), 0.0)
        kept = meeting.detached(rule.lowered)
        return Answer(kept, rule, losses, valid, floored & valid, negatives.count, positive_count)

    def _is_simple(self, meeting: Meeting, scale: Tensor) -> bool:
        """Has every anchor one positive, and its loss the form that kernels with a `losses` know?"""
        one = meeting.pairs is not None and meeting.pairs.shape[1] == 1 and meeting.real is None
        known = self.negative_count != "batch" and (self._prior is None or self.debias == "hcl")
        return one and known and scale.dtype == torch.float32

    def _simple_answer(self, meeting: Meeting, scale: Tensor, weights: Rule, kernel: Kernel, losses: Losses) -> Answer:
        """As `_answer`, in few launches: how several positives combine makes no difference if there is but one."""
        assert meeting.pairs is not None
        best = None
        if any(part.needs_positive for part in self._hardening):
            best = (meeting.pairs[:, 0].detach() * scale.detach()).repeat(meeting.places.views)
        rule = rules.banded(self, weights, best, meeting, scale)
        negatives = self._negatives(meeting, scale, rule, kernel)
        found, floored = losses(
            negatives,
            meeting.pairs[:, 0],
            scale,
            None if self.negative_count == "support" else math.log(float(self.negative_count)),
            None if self._prior is None else (self._prior.log, self._prior.log_rest),
            None if self.normalize else math.log(torch.finfo(scale.dtype).tiny),
            not self.positive_in_denominator,
        )
        one = constant(1.0, scale.dtype, scale.device).expand(len(found))
        return Answer(meeting.detached(rule.lowered), rule, found, negatives.count > 0, floored, negatives.count, one)

    def _negatives(self, meeting: Meeting, scale: Tensor, rule: Rule, kernel: Kernel) -> LogSums:
        if meeting.who.columns > 0:
            return kernel.log_sums(meeting.anchors, meeting.candidates, scale, meeting.who, rule)
        none = meeting.anchors.new_zeros(len(meeting.anchors))  # an empty queue
        return LogSums(none - torch.inf, none - torch.inf, none)

    def _combined(self, positives: Positives, log_total: Tensor, lowered: Lowered) -> Tensor:
        """Each anchor's loss from its positives and the logarithm of its negatives' total, (A,)."""
        if self.combine_positives == "mean_of_logs":
            if self.positive_in_denominator:
                return positives.mean_softplus(log_total)
            return log_total - positives.mean()
        plain = positives.sums(Rule(largest=rules.largest_score(self), lowered=lowered))
        some = plain.count > 0
        log_sum = torch.where(some, plain.tilted, 0.0)  # log Σ e^p
        if self.combine_positives == "in_denominator":
            return torch.logaddexp(log_sum, log_total) - positives.mean()
        gap = log_total - (log_sum - plain.count.clamp(min=1).log())
        return softplus(gap, threshold=EXACT_SOFTPLUS) if self.positive_in_denominator else gap

    def _reduced(self, losses: Tensor, valid: Tensor, positive_count: Tensor) -> Tensor:
        if self.reduction == "none":
            return losses
        if self.average == "anchors":  # what is not valid is 0 already
            total, number = losses.sum(), valid.sum()
        else:
            weight = valid * positive_count
            total, number = (losses * weight).sum(), weight.sum()
        processes = distributed.world_size() if self.gather else 1
        everything = total if processes == 1 else distributed.total(total)
        if self.reduction == "mean":
            number = number if processes == 1 else distributed.total(number)
            total, everything = total / number.clamp(min=1), everything / number.clamp(min=1)
        if processes == 1:
            return total
        # The value is the global loss; the gradient is scaled so that DDP's average over processes is exact.
        share = processes * total
        return share + (everything - share).detach()

    def _kernel(self, device: torch.device | None = None) -> Kernel:
        general = any(part.has_general_weights for part in self.hardening)
        return choose(self.backend, general_weights=general, device=device)

    def _log_number(self, negatives: LogSums, meeting: Meeting) -> Tensor:
        """log Q, (A,) or ()."""
        if self.negative_count == "support":
            return negatives.count.log()
        if self.negative_count == "batch":
            return meeting.met().log()
        return negatives.count.new_full((), math.log(float(self.negative_count)))

    def _warn_if_floored(self, floored: float, anchors: float) -> None:
        if floored > anchors / 2 and not self._warned:
            self._warned = True
            prior = value(self.class_prior, self.progress)
            warnings.warn(
                f"{floored:.0f} of {anchors:.0f} anchors are floored: debiasing with class_prior={prior:g} takes away "
                "all of their negatives, which then get no gradient. Lower class_prior (0 turns debiasing off) or "
                "raise the temperature; diagnostics()['floored'] counts them.",
                stacklevel=6,  # the line that called the loss
            )

    def _adaptive(self) -> Iterator[Adaptive]:
        """The schedules with a memory, each once, in a fixed order."""
        settings: list[Any] = [self.temperature, self.class_prior]
        for part in self.hardening:
            settings += part.schedules()
        seen: set[int] = set()
        for setting in settings:
            for leaf in setting.leaves() if isinstance(setting, Schedule) else ():
                if isinstance(leaf, Adaptive) and id(leaf) not in seen:
                    seen.add(id(leaf))
                    yield leaf


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


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Guard(torch.autograd.Function):
    """Passes the loss on, and refuses its backward pass if the given negatives were overwritten meanwhile.

    A kernel that recomputes scores from a queue would otherwise give silently wrong gradients.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *watched: Tensor) -> Tensor:
        ctx.save_for_backward(*watched)
        return loss.clone()  # a view could not be changed in place, as in total += other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, *(None for _ in ctx.saved_tensors))  # unpacking compares the versions
