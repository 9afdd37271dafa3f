"""One output's text as it grows: detokenizing and stop strings together.

Invariant: the deltas joined are the text of the output, cut at the stop string where one was found.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from frontend_svc.text.detokenizer import SpecialTokens, make_detokenizer
from frontend_svc.text.stop import StopMatch, StopMatcher
from frontend_svc.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What tokens added: text, the stop string if one was found, and how many of the tokens belong to the output."""

    text: str
    stop_string: str | None
    num_tokens: int


class OutputText:
    """Text of one output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str],
        include_stop_str: bool,
        min_tokens: int,
        prompt_token_ids: Sequence[int],
        special: SpecialTokens = SpecialTokens.SKIPPED,
    ) -> None:
        """A stop string counts when it completes in the text of a token behind the first `min_tokens`."""
        self._detokenizer = make_detokenizer(tokenizer, prompt_token_ids, special)
        self._matcher = StopMatcher(stop, include_stop_str=include_stop_str) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def append(self, token_ids: Sequence[int]) -> TextDelta:
        """Adds tokens. After a delta with a stop string nothing may be added."""
        if self._matcher is None:
            return TextDelta(self._detokenizer.append(token_ids), None, len(token_ids))
        texts: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            found = self._matcher.append(
                self._detokenizer.append((token_id,)), may_stop=self._num_tokens > self._min_tokens
            )
            if isinstance(found, StopMatch):
                texts.append(found.text)
                return TextDelta("".join(texts), found.stop_string, count)
            texts.append(found)
        return TextDelta("".join(texts), None, len(token_ids))

    def finish(self, stop_token: bool) -> str:
        """What was held back, at the end of an output that no stop string ended.

        A stop token leaves no text because it is never appended, so `stop_token` changes nothing. What became of an
        unfinished character is not searched for stop strings: the end is decided already.
        """
        del stop_token
        rest = self._detokenizer.finish()
        return rest if self._matcher is None else self._matcher.finish() + rest
