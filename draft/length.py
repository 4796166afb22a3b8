"""One slot's drafts under the length rule, and what the text says of those that nobody verified.

A token that is drafted and not worth verifying is no loss: the target says its own, and whether it is the same one
shows a step or two later. So drafters are learnt about where drafting does not pay, too, and trying them costs no
more than drafting does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draft.calibration import Calibration
from draft.window import LengthPolicy
from spec_server.runtime.batch import Ints

_MOST_OPEN = 3  # drafts
_MOST_TOKENS = 4  # of a draft, behind those that are verified
_TRUSTED = 20.0  # tokens that every text is taken to have kept of as many that were promised
_KEPT, _FORGIVEN = 0.9, 0.99  # of the sums behind that, by a draft that is verified, and by one that is not


@dataclass(slots=True)
class _Unverified:
    """A draft of which only the first `n_verified` tokens are verified; the first one stands at `start`."""

    calibration: Calibration
    start: int
    tokens: Sequence[int]
    confidences: Sequence[float]
    n_verified: int
    n_stood: int = 0

    def is_open(self, text: Ints, last_token: int) -> bool:
        """Can the text, [n] and one more, not yet say how the draft would have done? If it can, that is learnt."""
        tokens, n_text = self.tokens, len(text)
        while self.n_stood < len(tokens):
            at = self.start + self.n_stood
            if at > n_text:
                return True
            if tokens[self.n_stood] != (last_token if at == n_text else text[at]):
                break
            self.n_stood += 1
        self.calibration.learn(self.confidences, self.n_stood, self.n_verified)
        return False


@dataclass(slots=True)
class _Promises:
    """How many tokens of this text's drafts from text were expected to stand, and how many did.

    Such a draft is right for long or wrong at once, as the text copies or only resembles. A table by position and
    confidence learns that from each place anew; here one long draft that fails speaks against the next one.
    """

    made: float = 0.0
    kept: float = 0.0
    open: float = 0.0  # of the draft that is being verified

    def share(self) -> float:
        return min(1.0, (self.kept + _TRUSTED) / (self.made + _TRUSTED))

    def make(self, probabilities: Sequence[float]) -> None:
        p_all = 1.0
        for p in probabilities:
            p_all *= p
            self.open += p_all

    def keep(self, n_stood: int) -> None:
        if self.open:
            self.made, self.kept, self.open = _KEPT * self.made + self.open, _KEPT * self.kept + n_stood, 0.0

    def forgive(self) -> None:
        """A draft was not verified, perhaps for what is held against it."""
        self.made, self.kept = _FORGIVEN * self.made, _FORGIVEN * self.kept


class DraftLength:
    """One slot's draft under the rule: the drafter asks it before the first token and after each."""

    __slots__ = (
        "_calibration",
        "_calibrations",
        "_confidences",
        "_drafter",
        "_policy",
        "_probabilities",
        "_promises",
        "_seq_id",
        "_start",
        "_unverified",
    )

    def __init__(self, policy: LengthPolicy, calibrations: Mapping[str, Calibration], seq_id: int) -> None:
        self._policy = policy
        self._calibrations = calibrations
        self._seq_id = seq_id
        self._start = 0
        self._unverified: list[_Unverified] = []
        self._promises = _Promises()

    def begin(self) -> None:
        """A request begins, perhaps with another text: what was drafted is forgotten."""
        self._unverified.clear()
        self._policy.begin(self._seq_id)

    def read(self, text: Ints, last_token: int) -> None:
        """The next draft goes behind that text, [n] and one more token."""
        self._start = len(text) + 1
        self._promises.open = 0.0
        if self._unverified:
            self._unverified = [draft for draft in self._unverified if draft.is_open(text, last_token)]

    def opens(self, drafter: str) -> bool:
        """Is a draft by `drafter` worth a try?"""
        self._drafter, self._calibration = drafter, self._calibrations[drafter]
        self._confidences, self._probabilities = list[float](), list[float]()
        return self._policy.opens(self._seq_id, self._calibration, drafter)

    def goes_on(self, confidence: float) -> bool:
        """A token was drafted with that confidence, 0 to 1: is another one worth drafting?"""
        self._probabilities.append(self._calibration.drafted(len(self._confidences), confidence))
        self._confidences.append(confidence)
        return self._policy.goes_on(self._probabilities, self._calibration, self._drafter)

    def chooses(self, drafter: str, tokens: Sequence[int], confidence: float) -> int:
        """How many tokens of a draft that costs nothing are worth verifying; all have one confidence."""
        calibration, promises = self._calibrations[drafter], self._promises
        probabilities = calibration.probabilities(confidence, len(tokens))
        first = probabilities[0]
        probabilities[0] *= promises.share()
        n = self._policy.choose(self._seq_id, probabilities)
        if n:
            promises.make([first, *probabilities[1:n]])
        else:
            promises.forgive()
        if n < len(tokens):
            self._watch(calibration, tokens, [confidence] * len(tokens), n)
        return n

    def stood(self, n_tokens: int) -> None:
        """Of the draft that was verified, whoever made it, the first n_tokens stood."""
        self._promises.keep(n_tokens)
        if n_tokens:
            self._policy.quiet.stood()

    def keeps(self, tokens: Sequence[int]) -> int:
        """How many of the drafted tokens are worth verifying."""
        n = self._policy.cut(self._seq_id, self._probabilities, self._drafter)
        if n < len(tokens):
            self._watch(self._calibration, tokens, self._confidences, n)
        return n

    def _watch(
        self, calibration: Calibration, tokens: Sequence[int], confidences: Sequence[float], n_verified: int
    ) -> None:
        if len(self._unverified) < _MOST_OPEN:
            end = n_verified + _MOST_TOKENS
            self._unverified.append(
                _Unverified(calibration, self._start, tokens[:end], confidences[:end], n_verified)
            )

    @property
    def drops_all(self) -> bool:
        """Is this draft a try of which nothing will be verified, whatever it is?"""
        return self._policy.drops_all

    def spent(self, n_steps: int, ms: float, last_ms: float, lag_ms: float = 0.0) -> None:
        """What drafting took, and the last of its steps, for all slots of the step together; lag_ms: what reading the
        text took that the drafter lacked."""
        self._policy.pace.drafted(self._drafter, n_steps, ms, last_ms, lag_ms)
