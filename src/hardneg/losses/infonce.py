"""The objective: InfoNCE with masked, banded and tilted negatives."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Never

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.losses import combine, hints, infonce_settings, kernels, paired
from hardneg.losses import settings as options
from hardneg.losses.call import Call
from hardneg.losses.candidates import CandidateSet, candidate_sets
from hardneg.losses.diagnostics import CallRecord, Diagnostics, pair_record
from hardneg.losses.execution import check_forward, choose_kernel, computing_on, is_eager
from hardneg.losses.given_scores import score_set
from hardneg.losses.guide_inputs import Guide, check_guide
from hardneg.losses.hardening import Hardening, Uniform
from hardneg.losses.inputs import Inputs, prepare
from hardneg.losses.kernels import Kernel
from hardneg.losses.kernels.interface import GuardedLoss
from hardneg.losses.schedules import Setting, value
from hardneg.losses.settings import Adjustable, Settings
from hardneg.losses.sources import BySource, Hardenings, Negatives, SourceTensors, unpacked
from hardneg.losses.temperature import Learnable
from hardneg.losses.tilt_state import TiltState


class InfoNCE(TiltState, Adjustable):
    """InfoNCE over a negative distribution ``q ∝ mask · band · tilt``: every method of the field in one module.

    For an anchor with positives of score p and candidates of score s = cos/temperature it computes
    ``mean log(1 + Q·G·e^{−p})``, where G is the expectation of e^s under q, corrected for the class prior.

    Args:
        temperature: number > 0, schedule, or `Learnable`
        hardening: one `Hardening` or a tuple of them: at most one tilt, any number of bands, which intersect; or a
            mapping of them by source, ``{"batch": …, "given": …}``: each source is then a distribution of its own
            (percentiles are ranked within it) and their totals Q·G are added. A source without an entry is uniform;
            only the batch is debiased
        class_prior: τ⁺, probability that a random sample has the anchor's class, in [0, 1); 0 disables debiasing
        debias: ``"hcl"`` (the paper's formula) or ``"exact"`` (the tilted share of the anchor's class)
        in_batch: candidates from ``"both"`` views (2B−2), from the ``"other"`` view (B−1), or None: no in-batch ones;
            or a tuple of directions, where z1 are queries and z2 documents: ``"query_to_doc"`` (required),
            ``"query_to_query"``, ``"doc_to_query"``, ``"doc_to_doc"``. Then anchors are z1, each direction is a
            distribution of its own, and their totals Q·G are added; ``"doc_to_query"`` adds the positive's e^p once
            more, as GTE does
        symmetric: with ``"other"``: the second view's rows are anchors too
        supervision: what labels are used for: ``"none"``, ``"positives"``, ``"negatives"`` or ``"full"``
        combine_positives: ``"mean_of_logs"``, ``"log_of_mean"``, ``"log_of_sum"`` (the sum of the positives'
            e^p instead of the mean) or ``"in_denominator"``
        average: over ``"anchors"``, or over all ``"pairs"`` of anchor and positive
        negative_count: Q: the ``"support"`` size, all candidates of the ``"batch"``, or a number
        positive_in_denominator: False gives the decoupled form log(Q·G) − p
        num_negatives: k negatives drawn per anchor, uniformly with replacement from its support
        weight_range: scores are rescaled to [−weight_range, weight_range] for the weights; for unnormalized embeddings
        grad_through_weights: False treats the weights as constants
        normalize_weights: False leaves the weights w = e^{βs} undivided: Q·G is Σ w·e^s with Q the support size; only
            without a class prior
        normalize: scale embeddings to unit length
        gather: True takes candidates from all processes, a ``torch.distributed.ProcessGroup`` from those of the group;
            also shared given ones, which count once if they are the same on every process. Every process returns the
            global loss, and the average of the processes' gradients (as DDP computes it) is exactly its gradient
        backend: ``"reference"`` (plain PyTorch, any setting), ``"tiled"`` (memory linear in the batch), ``"fused"``
            (Triton, on CUDA devices) or ``"auto"``: fused on a GPU, else tiled, which is faster than the reference at
            every size measured; the reference for general weights, in ``torch.compile`` and in ``torch.func``
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (one loss per anchor: z1's, then z2's where they are anchors)
        generator: gives the seed of the draws of ``num_negatives``, once, at construction (None: PyTorch's default
            generator). Each call draws by that seed and a counter of calls; both are in ``state_dict()``

    Numbers may be numpy scalars or tensors without dimensions. Every setting may be assigned later,
    ``loss.class_prior = 0.1``; it is checked as here and takes effect at the next call. Gradients can be differentiated
    again (``create_graph=True``); that takes memory for whole score matrices.

    Examples:
        >>> import torch, hardneg as hn
        >>> loss = hn.InfoNCE(temperature=0.5, hardening=hn.Exponential(1.0), class_prior=0.1)
        >>> z1, z2 = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)
        >>> loss(z1, z2).backward()
        >>> z1.grad.shape
        torch.Size([32, 64])
    """

    temperature: Setting | Learnable
    hardening: tuple[Hardening, ...] | BySource
    class_prior: Setting
    debias: options.Debias
    in_batch: options.InBatch | None
    symmetric: bool
    supervision: options.Supervision
    combine_positives: options.CombinePositives
    average: options.Average
    negative_count: options.NegativeCount | float
    positive_in_denominator: bool
    num_negatives: int | None
    weight_range: float | None
    grad_through_weights: bool
    normalize_weights: bool
    normalize: bool
    gather: distributed.Gather
    backend: options.Backend
    reduction: options.Reduction
    generator: torch.Generator | None
    draw_state: Tensor  # (2,), the seed and the number of calls that have drawn; only if num_negatives is given

    _settings: Settings  # with schedules at the current progress
    _key: tuple[str, Settings] | None = None  # of the settings, for compiled graphs
    _last: Callable[[], Diagnostics] | None = None  # diagnostics of the last call, computed on request
    _plan: paired.Plan | None = None  # of the last call that took the short path
    _seeded_by: torch.Generator | None = None

    def __init__(
        self,
        temperature: Setting | Learnable = 0.5,
        hardening: Hardenings | Mapping[str, Hardenings] = Uniform(),  # noqa: B008  # frozen
        *,
        class_prior: Setting = 0.0,
        debias: options.Debias = "hcl",
        in_batch: options.InBatch | None = "both",
        symmetric: bool = False,
        supervision: options.Supervision = "none",
        combine_positives: options.CombinePositives = "mean_of_logs",
        average: options.Average = "anchors",
        negative_count: options.NegativeCount | float = "support",
        positive_in_denominator: bool = True,
        num_negatives: int | None = None,
        weight_range: float | None = None,
        grad_through_weights: bool = True,
        normalize_weights: bool = True,
        normalize: bool = True,
        gather: distributed.Gather = False,
        backend: options.Backend = "auto",
        reduction: options.Reduction = "mean",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self._configure({name: given for name, given in locals().items() if name in self.SETTINGS})

    def forward(
        self,
        z1: Tensor,
        z2: Tensor | None = None,
        *more: Never,
        labels: Tensor | None = None,
        negatives: Negatives | None = None,
        exclude: SourceTensors | None = None,
        negative_labels: SourceTensors | None = None,
        negative_mask: SourceTensors | None = None,
        positive_mask: Tensor | None = None,
        ids: Tensor | None = None,
        negative_ids: SourceTensors | None = None,
        not_negatives: Tensor | None = None,
        guide: Guide | None = None,
        negative_guide: SourceTensors | None = None,
        scale: float | Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch.

        z1: (B, d) · z2: (B, d), or (B, M, d) for M positives of anchors z1; None if positives are found by label ·
        labels: (B,) integers, −1 = unknown · negatives: (N, d) shared or (B, N, d) per anchor, added to the candidates
        in the batch · exclude: (B,) or (B, E) indices into negatives · negative_labels: (N,) or (B, N); rows of the
        anchor's label are positives or no negatives, as ``supervision`` says, and rows of label −1 are negatives ·
        negative_mask: (B, N) bool, True = may be a negative; row i holds for both views of i. What exclude and
        negative_mask leave out is no positive either · positive_mask: (B, M) bool, for z2 (B, M, d) that is padded:
        True = is a positive

        ids: (B,), or (B, 2) of the rows of z1 and z2 (for M positives (B, 1 + M)), integers ≥ 0, −1 = unknown ·
        negative_ids: (N,) or (B, N) · not_negatives: (P, 2) pairs of ids, in any order. A candidate with the id of the
        anchor or of its positive, or that forms such a pair with the anchor, is no negative. This takes memory for
        A + N + P numbers.

        guide: embeddings of z1 and of z2 by a guide model, (B, e) each (for M positives (B, M, e)), for `Guided`; one
        tensor if there is no z2 · negative_guide: (N, e) or (B, N, e). Its scores take no more memory than the loss's.

        scale: number or tensor (), replaces 1/temperature in this call; differentiable

        ``negatives`` may be a `Queue` or a `MemoryBank`, which stands for its keys or rows. The labels of a queue are
        used if the loss is supervised, its ids if ``ids`` are given, unless the call has others. ``negatives`` may also
        be a mapping by the caller's own names of sources, and ``exclude``, ``negative_labels``, ``negative_mask``,
        ``negative_ids``, ``negative_guide`` then are mappings with some of its names.

        Examples:
            >>> import torch, hardneg as hn
            >>> z1, z2, mined, queue = torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 2, 8), torch.randn(16, 8)
            >>> loss = hn.InfoNCE(hardening={"batch": hn.BelowPositive(), "queue": hn.Exponential(1.0)})
            >>> loss(z1, z2, negatives={"mined": mined, "queue": queue}, ids=torch.tensor([7, 7, 8, 9])).shape
            torch.Size([])
        """
        if more:
            raise TypeError("only z1 and z2 are positional: pass labels and all other arguments by keyword, labels=")
        if negatives is not None and not isinstance(negatives, Tensor):
            given_labels = negative_labels is not None
            negatives, negative_labels, negative_ids = unpacked(
                negatives,
                negative_labels,
                negative_ids,
                with_labels=self.supervision != "none",
                with_ids=ids is not None,
            )
            if negative_labels is not None and not given_labels and is_eager():
                self._warn_once("no labels", hints.no_labels(negative_labels), stacklevel=4)
        call = Call(
            z1, z2, labels, negatives, exclude, negative_labels, negative_mask, positive_mask, ids, negative_ids,
            not_negatives, guide, negative_guide, scale,
        )  # fmt: skip
        if torch.compiler.is_compiling():
            if self._shares:  # the update of β is not part of a graph
                from hardneg.losses.uncompiled import uncompiled  # imports the compiler

                return uncompiled(self.forward, **call._asdict())  # type: ignore[no-any-return]
            found = self._compiled_loss(call)
            if found is not None:
                return found
        loss = self._loss(call)
        if is_eager():
            self._count_call(loss)
            if self.in_batch is not None:
                alone = negatives is None and len(z1) == 1
                self._give_hints(self.gather, labels if negatives is None else None, one_view=z2 is None, alone=alone)
        return loss

    def from_scores(self, positive: Tensor, candidates: Tensor, mask: Tensor | None = None) -> Tensor:
        """The loss from scores that are computed elsewhere, such as those of a cross-encoder; by the reference kernel.

        positive: (B, M) scores of the anchors' positives · candidates: (B, N) scores of all their candidates; both
        before division by the temperature · mask: (B, N) bool, True = may be a negative. For a hardening by source the
        candidates are the source ``"given"``. Scores have no known range: with a class prior, G is kept above the
        smallest positive number only, as for unnormalized embeddings.

        Examples:
            >>> import torch, hardneg as hn
            >>> positive, candidates = torch.tensor([[0.9], [0.8]]), torch.tensor([[0.1, 0.5], [0.3, 0.2]])
            >>> hn.InfoNCE(temperature=0.1).from_scores(positive, candidates).shape
            torch.Size([])
        """
        if self._adaptive:
            self._move_to(self.progress)
        settings = self._settings
        candidate_set, settings, validity = score_set(settings, positive, candidates, mask)
        key = None if settings.num_negatives is None else self._next_key()
        with computing_on(positive.device):
            settings, inverse, _ = combine.with_scale(settings, None, candidate_set.anchors)
            sets, kernel = [[candidate_set]], kernels.REFERENCE
            settings, betas = self._tilted(settings, (positive, candidates), lambda: (sets, inverse))
            loss, records = combine.loss_of_sets(settings, sets, inverse, kernel, key, validity=validity)
        self._keep_records(lambda: records, inverse.detach(), betas)
        if loss.requires_grad and is_eager():
            loss = GuardedLoss.apply(loss, None, inverse, positive, candidates, mask)  # type: ignore[no-untyped-call]
        return loss

    def check_device(self, device: torch.device) -> None:
        """Raise if its backend cannot run on this device."""
        self._kernel(device)

    def diagnostics(self) -> dict[str, float]:
        """Statistics of the negatives of the last call; see `hardneg.losses.diagnostics.Diagnostics`.

        With `EffectiveShare` also ``beta``; with a hardening by source ``beta_batch`` and so on.
        """
        report = self.last_call().compute()
        self._warn_if_floored(report["floored"], report["anchors"], stacklevel=3)
        return report

    def last_call(self) -> Diagnostics:
        """The negatives of the last call, of which `diagnostics` and `hardneg.insight.gradient_shares` are made."""
        if self._last is None:
            raise RuntimeError(
                "diagnostics() describes the last call outside of torch.func, and there has been none: call the loss "
                "first"
            )
        return self._last()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # The key of another process is not known here.
        self.__dict__["_key"] = None if self._scheduled else paired.key_of(self._settings)

    def extra_repr(self) -> str:
        shown = ("hardening", "class_prior", "in_batch", "supervision", "negative_count", "reduction", "backend")
        first = [] if isinstance(self.temperature, Learnable) else [f"temperature={self.temperature!r}"]
        return ", ".join(first + [f"{name}={getattr(self, name)!r}" for name in shown])

    def _configure(self, given: dict[str, Any]) -> None:
        given = infonce_settings.check(given)
        settings = infonce_settings.resolve(given, self.progress)
        adaptive = infonce_settings.adaptive_schedules(given)
        # Written to __dict__: nn.Module's own assignment searches parameters, buffers and children for each name.
        self._modules.pop("temperature", None)
        # A schedule would compile a new graph at every step: then the reference kernel is compiled.
        scheduled = tuple(infonce_settings.schedules(given))
        key = None if scheduled else paired.key_of(settings)
        self.__dict__.update(given, _settings=settings, _adaptive=adaptive, _scheduled=scheduled, _key=key)
        if isinstance(given["temperature"], Learnable):
            del self.__dict__["temperature"]
            self.add_module("temperature", given["temperature"])
        if self.num_negatives is None:
            self._buffers.pop("draw_state", None)
        elif "draw_state" not in self._buffers or self.generator is not self._seeded_by:
            device = torch.device("cpu") if self.generator is None else self.generator.device
            with torch.inference_mode(False):  # training could not update an inference tensor
                seed = int(torch.randint(1 << 48, (), generator=self.generator, device=device))
                self.register_buffer("draw_state", torch.tensor([seed, 0]))
            self._seeded_by = self.generator
        self._configure_tilts(tuple(settings.effective_shares))

    def _move_schedules(self, progress: float) -> None:
        if not self._scheduled:  # what was decided for these settings holds
            return
        # Schedules become plain numbers here, checked, and outside of any compiled graph.
        self._settings = infonce_settings.resolve({name: getattr(self, name) for name in self.SETTINGS}, progress)

    def _loss(self, call: Call) -> Tensor:
        """The loss of a call in eager mode, or by operations that `torch.compile` compiles."""
        if self._adaptive:
            self._move_to(self.progress)
        z1, z2, labels = call.z1, call.z2, call.labels
        settings, device = self._settings, z1.device if isinstance(z1, Tensor) else torch.device("cpu")
        with computing_on(device):
            betas: dict[str, Tensor] = {}
            if self._shares:
                call.check(settings)
                seen = (z1, z2, *call.by_source()[1])
                settings, betas = self._tilted(settings, seen, lambda: self._candidate_sets(call))
            plan = self._pair_plan(settings, device, call)
            if plan is not None:
                # A plan is for tensors only, not for mappings of them by source.
                short = plan.compute_loss(z1, z2, labels, call.negatives, call.exclude, call.negative_mask)  # type: ignore[arg-type]
                if short is not None:
                    loss, pairs, inverse = short
                    self._keep_records(lambda: [pair_record(pairs())], inverse, betas)
                    return loss
            kernel = self._kernel(device)
            key = None if settings.num_negatives is None else self._next_key()
            names, tensors, inputs = self._prepared(settings, call, kernel)
            settings, inverse, validity = combine.with_scale(settings, call.scale, inputs.views)
            inputs = replace(inputs, validity=checks.jointly(inputs.validity, validity))
            loss, records = combine.compute_loss(settings, inputs, inverse, kernel, key)
        self._keep_records(lambda: records, inverse.detach(), betas)
        if loss.requires_grad and is_eager():
            plain = None if kernel is kernels.REFERENCE else partial(combine.plain_loss, settings, key, names=names)
            loss = GuardedLoss.apply(loss, plain, inverse, *tensors)  # type: ignore[no-untyped-call]
        return loss

    def _prepared(
        self, settings: Settings, call: Call, kernel: Kernel
    ) -> tuple[tuple[str, ...], tuple[Any, ...], Inputs]:
        """The names of the given sources of a call, its tensors as `prepare` takes them, and what that returns."""
        names, given = call.by_source()
        guides = check_guide(settings, call.guide, call.z2, names, given)
        # The first source's tensors before those of others.
        rest = (call.positive_mask, call.ids, call.not_negatives, *guides)
        tensors: tuple[Any, ...] = (call.z1, call.z2, call.labels, *given[:4], *rest, *given[4:])
        return names, tensors, prepare(*tensors, names=names, normalize=settings.normalize, kernel=kernel)

    def _candidate_sets(self, call: Call) -> tuple[list[list[CandidateSet]], Tensor]:
        """The candidate sets of a call, and 1/temperature, ()."""
        inputs = self._prepared(self._settings, call, kernels.REFERENCE)[2]
        settings, inverse, _ = combine.with_scale(self._settings, call.scale, inputs.views)
        return candidate_sets(inputs, settings), inverse

    def _pair_plan(self, settings: Settings, device: torch.device, call: Call) -> paired.Plan | None:
        """The plan of the short path, None if this call takes the general one; raises if arguments do not fit."""
        short = call.has_short_form and is_eager()
        repeatable = short and call.exclude is None and call.negative_mask is None
        plan = self._plan
        if repeatable and plan is not None and plan.fits(settings, call.z1, call.z2, call.labels, call.negatives):
            return plan
        call.check(settings)
        plan = None
        if short:
            _, (negatives, exclude, _, negative_mask, *_) = call.by_source()
            kernel = self._kernel(device)
            plan = paired.plan(settings, kernel, call.z1, call.z2, call.labels, negatives, exclude, negative_mask)
        # Written to __dict__: nn.Module's own assignment searches parameters, buffers and children first.
        kept = repeatable and not settings.gather and paired.is_constant(settings)
        self.__dict__["_plan"] = plan if kept else None
        return plan

    def _compiled_loss(self, call: Call) -> Tensor | None:
        """The loss inside `torch.compile` by the fused kernel; None if the reference kernel is compiled instead."""
        z1, z2 = call.z1, call.z2
        if not kernels.HAS_TRITON or (self.backend != "fused" and z1.device.type != "cuda"):
            return None
        from hardneg.losses import compiled

        settings, keyed = self._settings, self._key
        if not compiled.is_fused(self.backend, z1.device.type):
            return None
        if keyed is not None and call.has_short_form:
            key, _ = keyed
            _, (negatives, exclude, _, negative_mask, *_) = call.by_source()
            if paired.suits_call(settings, z1, z2, negatives):
                call.check(settings)
                inverse = combine.inverse_temperature(settings, z1, torch.float32)
                tensors = (z1, z2, negatives, inverse, call.labels, exclude, negative_mask)
                loss, saved = compiled.loss(*tensors, key)
                seen = [None if x is None else x.detach() for x in tensors]
                self._keep_records(lambda: [pair_record(compiled.record(saved, *seen, key))], inverse.detach())
                return loss
        if self.backend == "auto":
            return None
        from hardneg.losses.uncompiled import uncompiled

        return uncompiled(self.forward, **call._asdict())  # type: ignore[no-any-return]

    def _kernel(self, device: torch.device) -> Kernel:
        return choose_kernel(self.backend, self._settings, device)

    def _next_key(self) -> Tensor:
        """The key of this call's draws, (2,)."""
        check_forward("num_negatives would draw different negatives")
        # The transforms of torch.func allow no change of a buffer, but this one depends on none of their tensors.
        transformed = torch._C._are_functorch_transforms_active()
        with torch._C._DisableFuncTorch() if transformed else nullcontext():
            key: Tensor = self.draw_state.clone()
            self.draw_state[1] += 1
        return key

    def _keep_records(
        self, records: Callable[[], list[CallRecord]], scale: Tensor, betas: dict[str, Tensor] | None = None
    ) -> None:
        """Keep the records of a call for the diagnostics, and warn if most anchors are floored."""
        if torch._C._are_functorch_transforms_active():  # whose tensors end with them
            self.__dict__["_last"] = None
            return
        # Written to __dict__: nn.Module's own assignment searches parameters, buffers and children first.
        self.__dict__["_last"] = lambda: Diagnostics(records(), scale, betas)
        debiased = self._settings.prior is not None and scale.device.type == "cpu"
        if debiased and "floored" not in self._warned and not torch.compiler.is_compiling():
            floored = anchors = 0
            for record in records():
                floored += int(record.floored.sum())
                anchors += int(record.valid.sum())
            self._warn_if_floored(floored, anchors, stacklevel=7)

    def _warn_if_floored(self, floored: float, anchors: float, stacklevel: int) -> None:
        if floored <= anchors / 2:
            return
        prior = value(self.class_prior, self.progress)
        message = (
            f"{floored:.0f} of {anchors:.0f} anchors are floored: debiasing with class_prior={prior:g} removes "
            "all of their negatives, which then get no gradient. Lower class_prior (0 turns debiasing off) or "
            "raise the temperature; diagnostics()['floored'] counts them."
        )
        self._warn_once("floored", message, stacklevel)  # the line that called the loss
