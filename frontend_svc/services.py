"""What the edges of a frontend share, whatever protocol they speak."""

from dataclasses import dataclass

from frontend_svc.active_request import ActiveRequests
from frontend_svc.embedding import EmbeddingJourney
from frontend_svc.journey import Journey
from frontend_svc.metrics import FrontendMetrics
from frontend_svc.prompts import Prompts
from frontend_svc.routing.engine_table import EngineTable
from frontend_svc.text.tokenizer import Tokenizer
from frontend_svc.validation import Caps
from shared.errors import UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the servicers share."""

    tokenizer: Tokenizer
    prompts: Prompts
    engines: EngineTable
    requests: ActiveRequests
    journey: Journey
    embeddings: EmbeddingJourney
    metrics: FrontendMetrics
    caps: Caps
    model_names: tuple[str, ...]
    model_root: str
    max_prompt_bytes: int

    @property
    def max_model_len(self) -> int:
        """The engines' context, 0 while none is ready."""
        try:
            return self.engines.limits().max_model_len
        except UnavailableError:
            return 0
