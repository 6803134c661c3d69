"""Text of one request's output: incremental decoding, then the search for stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mvllm.core.request import SamplingParams
from mvllm.core.text.stop import StopState, StopStrings
from mvllm.core.types import TokenId


class TextDecoder(Protocol):
    """Tokens to text, one at a time; states are immutable values. `Detokenizer` is one."""

    def start(self, prompt_token_ids: Sequence[TokenId]) -> Any: ...

    def advance(self, state: Any, token_id: TokenId) -> tuple[Any, str]:
        """The next state, and the text that has become certain."""

    def finish(self, state: Any) -> str:
        """Text still held back (half a character, say) when no more tokens come."""


TextDecoderFor = Callable[[SamplingParams], TextDecoder]
"""Makes the decoder of a request, with its choice about special tokens."""


@dataclass(frozen=True, slots=True)
class TextStep:
    """What one token does to the text."""

    after: RequestText
    text: str  # newly certain
    matched_stop: str | None = None


@dataclass(frozen=True, slots=True)
class RequestText:
    """Where the text of one request stands: an immutable value, so a step that fails leaves no trace."""

    decoder: TextDecoder
    stops: StopStrings | None
    decoder_state: Any
    stop_state: StopState

    @classmethod
    def start(
        cls, decoder: TextDecoder, stops: StopStrings | None, prompt_token_ids: Sequence[TokenId]
    ) -> RequestText:
        return cls(decoder, stops, decoder.start(prompt_token_ids), StopState())

    def advance(self, token_id: TokenId, *, search: bool) -> TextStep:
        """Add a token. Without `search` its text passes unexamined (output still below min_tokens)."""
        decoder_state, delta = self.decoder.advance(self.decoder_state, token_id)
        if self.stops is None or not search:
            return TextStep(self._after(decoder_state, self.stop_state), delta)
        stop_state, text, matched = self.stops.advance(self.stop_state, delta)
        return TextStep(self._after(decoder_state, stop_state), text, matched)

    def _after(self, decoder_state: Any, stop_state: StopState) -> RequestText:
        return RequestText(self.decoder, self.stops, decoder_state, stop_state)

    def finish(self, *, search: bool) -> tuple[str, str | None]:
        """The held-back text at the end of the output, and the stop string it completes, if any."""
        delta = self.decoder.finish(self.decoder_state)
        if self.stops is None or not search:
            return delta, None
        stop_state, text, matched = self.stops.advance(self.stop_state, delta)
        return (text, matched) if matched is not None else (text + self.stops.flush(stop_state), None)
