from moaspec import errors as errors
from moaspec import model as model
from moaspec import target as target
from moaspec.backends.load import load_target
from moaspec.drafting.other_proposers.model_proposer import ModelProposer
from moaspec.drafting.other_proposers.oracle_proposer import OracleProposer
from moaspec.generation.api import generate, stream
from moaspec.generation.drafters import load_drafter
from moaspec.generation.session import Session
from moaspec.generation.transformers_hook import custom_generate
from moaspec.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.ngram_proposer import NgramProposer
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.request_state import Event, GenerationResult
from moaspec_core.sampling.params import SamplingParams
from moaspec_core.tokens.token_rules import TokenRules

__version__: str

__all__ = [
    "Chain",
    "Engine",
    "Event",
    "GenerationResult",
    "ModelProposer",
    "NgramProposer",
    "OracleProposer",
    "SamplingParams",
    "Session",
    "Target",
    "TokenRules",
    "Tree",
    "custom_generate",
    "generate",
    "load_drafter",
    "load_target",
    "stream",
]
