"""Transformers' own `generate`, decoding through the engine.

`model.generate(..., custom_generate=custom_generate(drafter))` prepares everything as always
(prompts, processors, criteria) and then calls the object made here instead of its own loop.

Legend: B rows, T tokens of the padded prompts, V vocabulary.
"""

import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moaspec.generation.local_engine import local_engine
from moaspec.generation.shaping import shaping_for
from moaspec.model.moa import MoADrafter
from moaspec.target.generic.generic_target import target_of
from moaspec.target.target import plain_torch
from moaspec.target.thread_limiter import ThreadLimiter
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.engine.engine import Engine
from moaspec_core.errors import InputError
from moaspec_core.policy.policies import DraftSettings, FreeBranches
from moaspec_core.sampling.params import LogitsProcessor, SamplingParams

_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_STATEFUL = (
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
)
_WARPERS = (
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
    (MinPLogitsWarper, "min_p"),
)
"""In the order in which both sides apply them."""


_MEDIA = ("pixel_values", "image_", "video_", "input_features", "audio_")
"""How transformers' names of inputs begin that are no text."""


class CustomGenerate:
    """The decoding loop that `custom_generate` returns and transformers calls."""

    def __init__(self, drafter: MoADrafter | Proposer | None, **draft_options: Any) -> None:
        self._drafter, self._draft_options = drafter, draft_options

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Decode; transformers calls this, see `custom_generate`."""
        dropped = _arguments_of_generate(sys._getframe(1))
        streamer = dropped.get("streamer") if streamer is None else streamer
        _check_assistant(dropped.get("assistant_model"))
        _check(model, input_ids, generation_config, model_kwargs)
        name = model.config.name_or_path or "this model"
        target = target_of(model, None, name=name, freeze=False)
        target.threads = ThreadLimiter()
        shaping = shaping_for(target, self._drafter, **self._draft_options)
        engine = local_engine(target, self._drafter, num_target_layers=shaping.num_target_layers)
        prompts = _Prompts(input_ids, model_kwargs.get("attention_mask"))
        choices = generation_config.num_return_sequences or 1
        limit = int(generation_config.max_length) - input_ids.shape[1]
        processors, sampling = _settings(logits_processor, generation_config, seed)
        ends = _end_tokens(stopping_criteria)
        handles = [
            engine.add(
                prompts.token_ids(row),
                max_new_tokens=limit,
                stop_token_ids=ends,
                shape=shaping.policy(sampling),
                free_branches=shaping.branches(sampling),
                sampling=replace(
                    sampling, choice=row % choices, processors=prompts.adapt(processors, row)
                ),
            )
            for row in range(len(input_ids))
        ]
        rows = _Rows(engine, handles, generation_config, stopping_criteria)
        sequences = rows.decode(input_ids, streamer)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences


def custom_generate(
    drafter: MoADrafter | Proposer | None = None,
    *,
    tree: Tree | str = "auto",
    free_branches: FreeBranches = "auto",
    num_target_layers: int | None = None,
) -> CustomGenerate:
    """Transformers' hook: `model.generate(**inputs, custom_generate=custom_generate(drafter))`.

    Honoured as transformers' users pass them: left-padded batches, every length limit, EOS ids,
    logits processors of the configuration and of the caller (a custom one must depend on its
    arguments only: it is also called on prefixes that end in a draft), stopping criteria (called
    once per step on all rows, with verified tokens only), streamers, `num_return_sequences`, and
    `return_dict_in_generate`. Greedy text is transformers' own. Sampled text is that of
    `moaspec.generate`: `seed=` may be given to `model.generate`; without it the seed is drawn from
    torch's default generator, so `torch.manual_seed` repeats a call. The model is not changed.

    Args:
        drafter: as for `moaspec.generate`; None decodes plainly.
        tree: shape of the drafts, as for `moaspec.generate`.
        free_branches: as for `moaspec.generate`.
        num_target_layers: N, as for `moaspec.generate`.

    Raises:
        ShapeError: a text that is no shape.
        InputError: something else than the types say; by the call: beams and other modes, scores,
            logits, attentions or hidden states asked for, an assistant model, embeddings or a
            filled cache as input, pads that are not on the left, a model in training mode.
        UnsupportedTargetError: by the call: a model that cannot be drafted for.
    """
    DraftSettings(tree, free_branches)  # refuses what is no shape now, not at the first call
    return CustomGenerate(
        drafter, tree=tree, free_branches=free_branches, num_target_layers=num_target_layers
    )


def _arguments_of_generate(frame: FrameType | None) -> dict[str, Any]:
    """The local variables of the calling `generate`; the user's functions may lie between.

    Transformers (5.23) passes `streamer` and `assistant_model` to its own loops, but not to a
    custom one. It has already put the prompt into the streamer, so a reader would wait forever for
    the rest.
    """
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _check_assistant(assistant: Any) -> None:
    if assistant is not None:
        raise InputError(
            "generate got both assistant_model and custom_generate, and only one of them can "
            "draft. Leave assistant_model out, and give the drafter to custom_generate: of "
            "moaspec.load_drafter, or a small model as moaspec.ModelProposer(model, target). Or "
            "call generate without custom_generate."
        )


def _check(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]
) -> None:
    """Refuse what cannot be done exactly."""
    mode = config.get_generation_mode()
    if mode not in {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE}:
        raise InputError(f"custom_generate decodes greedily or samples; got {mode.value}.")
    asked = [name for name in _OUTPUTS if getattr(config, name)]
    if config.return_dict_in_generate and asked:
        raise InputError(
            f"{', '.join(asked)} cannot be given: tokens are verified several in one pass, whose "
            "logits are not kept. Leave them out, or call generate without custom_generate."
        )
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # named so from transformers 5.24
    if kwargs.get("inputs_embeds") is not None or (cache is not None and cache.get_seq_length()):
        raise InputError(
            "custom_generate starts from token ids: no inputs_embeds, no filled cache."
        )
    media = [name for name in kwargs if name.startswith(_MEDIA) and kwargs[name] is not None]
    media += kwargs.get("mm_encoder_outputs") or {}  # of transformers, by kind of input
    if media:
        raise InputError(
            f"custom_generate decodes text, and got {', '.join(media)}. Leave images and sound "
            "out, or call generate without custom_generate."
        )
    if model.training:
        raise InputError("The model is in training mode; call model.eval() first.")
    _check_positions(input_ids, kwargs)


def _check_positions(input_ids: Tensor, kwargs: dict[str, Any]) -> None:
    mask, given = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is None:
        mask = torch.ones_like(input_ids)
    if bool((mask[:, 1:] < mask[:, :-1]).any()) or not bool(mask[:, -1:].all()):
        raise InputError(
            "Pads must be on the left of every prompt; set tokenizer.padding_side = 'left'."
        )
    expected = mask.long().cumsum(-1) - 1
    if given is not None and bool(((given != expected) & mask.bool()).any()):
        raise InputError("position_ids must count the real tokens of each row; leave them out.")


def _settings(
    prepared: LogitsProcessorList, config: GenerationConfig, seed: int | None
) -> tuple[LogitsProcessorList, SamplingParams]:
    """Split a prepared list into processors and the warpers at its end, as sampling settings.

    The processors remain transformers' own code. The settings are passed to drafters as well, so
    that drafts take temperature and top-p into account.
    """
    if not config.do_sample:
        return prepared, SamplingParams(seed=seed)
    processors = LogitsProcessorList(prepared)
    settings: dict[str, Any] = {"temperature": 1.0}
    for kind, name in reversed(_WARPERS):
        if processors and type(processors[-1]) is kind and _is_ordinary(processors[-1]):
            settings[name] = getattr(processors.pop(), name)
    # From torch's generator, so that `torch.manual_seed` repeats a call, as it does without us.
    seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
    return processors, SamplingParams(seed=seed, **settings)


def _end_tokens(criteria: StoppingCriteriaList) -> list[int]:
    """The EOS ids of the criteria; users write -1 for none."""
    watched = [
        criterion.eos_token_id for criterion in criteria if type(criterion) is EosTokenCriteria
    ]
    return [int(token) for ids in watched for token in ids.flatten() if token >= 0]


def _is_ordinary(warper: Any) -> bool:
    """Whether a warper depends on its one number alone, as `generate` makes it."""
    least, filler = getattr(warper, "min_tokens_to_keep", 1), getattr(warper, "filter_value", None)
    return least == 1 and filler in (None, -math.inf)


class _Prompts:
    """The left-padded batch that transformers prepared."""

    def __init__(self, input_ids_BT: Tensor, mask_BT: Tensor | None) -> None:
        none = [0] * len(input_ids_BT)
        pads = none if mask_BT is None else (mask_BT == 0).sum(-1).tolist()
        self._pads = [ids_T[:pad].tolist() for ids_T, pad in zip(input_ids_BT, pads, strict=True)]
        self._ids = [ids_T[pad:].tolist() for ids_T, pad in zip(input_ids_BT, pads, strict=True)]

    def token_ids(self, row: int) -> list[int]:
        """A row without its pads."""
        return self._ids[row]

    def adapt(self, processors: LogitsProcessorList, row: int) -> tuple[LogitsProcessor, ...]:
        """Transformers' processors as one of ours, for one row of the batch.

        They count padded lengths, and some keep data of every row of the batch, such as its number
        of pads. So they get this row with its pads, repeated for every row of the batch. A function
        of batch index and prefix is called for this row alone.
        """
        stateful = [
            type(processor).__name__
            for processor in processors
            if type(processor).__name__ in _STATEFUL
        ]
        if stateful:
            raise InputError(
                f"{', '.join(stateful)} keeps a state from call to call; with speculation "
                "processors must depend on their arguments only."
            )
        pads, rows = self._pads[row], len(self._ids)
        processors = LogitsProcessorList(_for_row(processor, row) for processor in processors)

        def process(prefix: Sequence[int], logits_V: Tensor) -> Tensor:
            ids_T = torch.tensor([*pads, *prefix], device=logits_V.device)
            scores_BV: Tensor = processors(ids_T.repeat(rows, 1), logits_V.repeat(rows, 1))
            return scores_BV[row]

        return (process,) if processors else ()


def _for_row(processor: Any, row: int) -> Any:
    """A processor as it is, unless it asks the user's function about each row of the batch."""
    if type(processor) is not PrefixConstrainedLogitsProcessor:
        return processor
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _, ids_T: allowed(row, ids_T), num_beams=1)


class _Rows:
    """Hands verified tokens out step by step, as transformers' loop would produce them.

    Rows advance by rounds of different length. Criteria and streamers get one token of every row at
    a time; tokens of rows that are ahead wait.
    """

    def __init__(
        self,
        engine: Engine,
        handles: Sequence[int],
        config: GenerationConfig,
        criteria: StoppingCriteriaList,
    ) -> None:
        self._engine, self._handles, self._criteria = engine, handles, criteria
        self._results = [engine.result(handle) for handle in handles]
        self._pad_token = getattr(config, "_pad_token_tensor", None)
        # Without EOS ids transformers lets finished rows go on until the last one has finished.
        self._pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    @plain_torch()
    def decode(self, input_ids_BT: Tensor, streamer: Any) -> Tensor:
        """Prompts with their continuations, right-padded, on the device of the prompts."""
        ids_BT = input_ids_BT
        unfinished_B = torch.ones(len(ids_BT), dtype=torch.bool, device=ids_BT.device)
        try:
            while bool(unfinished_B.any()):
                step = ids_BT.shape[1] - input_ids_BT.shape[1]
                tokens_B = torch.tensor(self._tokens(step, unfinished_B.tolist())).to(ids_BT)
                ids_BT = torch.cat((ids_BT, tokens_B[:, None]), dim=1)
                unfinished_B &= ~self._criteria(ids_BT, None)
                unfinished_B &= ~torch.tensor(self._at_end(step)).to(unfinished_B)
                if streamer is not None:
                    streamer.put(tokens_B.cpu())
        finally:
            self._engine.abort_all()
        if streamer is not None:
            streamer.end()
        return ids_BT

    def _tokens(self, step: int, unfinished: Sequence[bool]) -> list[int]:
        """Every row's token of a step."""
        if self._pads_finished:
            self._abort_finished(unfinished)
        while any(
            result.stop_reason is None and len(result.token_ids) <= step for result in self._results
        ):
            self._engine.step()
        own = [goes_on or not self._pads_finished for goes_on in unfinished]
        return [
            result.token_ids[step] if takes and step < len(result.token_ids) else self._pad()
            for result, takes in zip(self._results, own, strict=True)
        ]

    def _abort_finished(self, unfinished: Sequence[bool]) -> None:
        for handle, result, goes_on in zip(self._handles, self._results, unfinished, strict=True):
            if not goes_on and result.stop_reason is None:
                self._engine.abort(handle)

    def _at_end(self, step: int) -> list[bool]:
        """Rows that the context's end leaves no further token."""
        return [
            result.stop_reason == "context" and len(result.token_ids) <= step + 1
            for result in self._results
        ]

    def _pad(self) -> int:
        if self._pad_token is None:
            raise InputError("Rows end at different lengths; set pad_token_id to fill them up.")
        return int(self._pad_token)
