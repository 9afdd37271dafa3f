"""Log-probabilities as clients get them: each token with its text and bytes. Knows no request.

Columns of an engine's table become a value a position; bytes that are no character by themselves read U+FFFD.
"""

from collections.abc import Iterable

from frontend_svc.request import PositionLogprobs, TokenCandidate
from frontend_svc.text.tokenizer import Tokenizer
from shared.types import TokenLogprobs


class LogprobReader:
    """Reads the tables of one output. `by_id`: the candidates were asked for by id, so that their rank is not told."""

    def __init__(self, tokenizer: Tokenizer, *, by_id: bool = False) -> None:
        self._tokenizer = tokenizer
        self._by_id = by_id
        # Tokens come again and again.
        self._pieces: dict[int, tuple[str, bytes]] = {}

    def read(self, tables: Iterable[TokenLogprobs]) -> list[PositionLogprobs]:
        """All positions of some tables, in order."""
        return [position for table in tables for position in self._positions(table)]

    def _positions(self, table: TokenLogprobs) -> Iterable[PositionLogprobs]:
        rows = zip(table.token_ids.tolist(), table.logprobs.tolist(), table.ranks.tolist(), strict=True)
        for token_ids, logprobs, rank in rows:
            candidates = [
                self._candidate(token_id, logprob, 0 if self._by_id else column)
                for column, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
                if column
            ]
            yield PositionLogprobs(self._candidate(token_ids[0], logprobs[0], rank), tuple(candidates))

    def _candidate(self, token_id: int, logprob: float, rank: int) -> TokenCandidate:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._tokenizer.token_piece(token_id)
        return TokenCandidate(token_id, logprob, rank, *piece)
