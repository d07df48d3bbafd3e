"""Ranked search: BM25 as Lucene 8 computes it, over memory-mapped postings.

With ``N`` documents that have a term at all, ``n`` documents that have term ``t``, ``f`` its frequency in a document,
``|d|`` the document's token count after Lucene's one-byte code and ``avg`` the mean token count:

    idf(t)     = ln(1 + (N - n + 0.5) / (n + 0.5))                             (float32)
    inv(d)     = 1 / (k1 * ((1 - b) + b * |d| / avg)),  k1 = 0.9, b = 0.4      (float32)
    w(t)       = idf(t) * count of t in the query                              (float32)
    score(t,d) = w - w / (1 + f * inv(d))                                      (float32)
    score(d)   = float32(sum over query terms, in double)

Order: score descending, equal scores by asin ascending. (Robertson and Zaragoza, "The Probabilistic Relevance
Framework: BM25 and Beyond", 2009; the constant factor k1 + 1 is left out, as in Lucene 8.)

Only documents that can still reach the first 50 are scored in full: terms are taken by their largest possible
contribution (Turtle and Flood's MaxScore, 1995), which keeps long queries over a million products to milliseconds.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent_system.environments.env_package.webshop.analysis import analyse
from agent_system.environments.env_package.webshop.storage import TextColumn, open_array

RESULTS = 50
MAX_TERMS = 1024
K1 = np.float32(0.9)
B = np.float32(0.4)
EXACT_LENGTHS = 24  # token counts below are coded exactly, larger ones by their top four bits

_SLACK = 1 - 1e-6  # sums are compared in double, ranked in float32
_SAMPLE = 256  # documents that are scored in full to find how high the 50th must be
_WORTH_A_SAMPLE = 10_000  # postings of the next term from which that pays


class TooManyTermsError(ValueError):
    """A query has more than 1,024 distinct terms, where the original fails."""


def encode_length(lengths: np.ndarray) -> np.ndarray:
    """Lucene's one-byte code of token counts (uint8): exact below 24, then four significant bits."""
    rest = np.maximum(np.asarray(lengths, dtype=np.int64) - EXACT_LENGTHS, 0)
    bits = np.zeros(rest.shape, dtype=np.int64)
    positive = rest > 0
    bits[positive] = np.floor(np.log2(rest[positive])).astype(np.int64) + 1
    shift = np.maximum(bits - 4, 0)
    mantissa = rest >> shift
    code = np.where(bits < 4, rest, (mantissa & 7) | ((shift + 1) << 3))
    return np.where(np.asarray(lengths) < EXACT_LENGTHS, lengths, EXACT_LENGTHS + code).astype(np.uint8)


def decode_length(codes: np.ndarray) -> np.ndarray:
    """Token counts that codes of :func:`encode_length` stand for."""
    codes = np.asarray(codes, dtype=np.int64)
    rest = np.maximum(codes - EXACT_LENGTHS, 0)
    shift = (rest >> 3) - 1
    wide = np.where(shift < 0, rest & 7, ((rest & 7) | 8) << np.maximum(shift, 0))
    return np.where(codes < EXACT_LENGTHS, codes, EXACT_LENGTHS + wide)


def impact_denominators(frequencies: np.ndarray, length_codes: np.ndarray, average: np.float32) -> np.ndarray:
    """``1 + f * inv(d)`` in float32 for arrays of term frequencies and coded lengths."""
    lengths = decode_length(length_codes).astype(np.float32)
    one = np.float32(1)
    inverse = one / (K1 * ((one - B) + B * lengths / np.float32(average)))
    return one + np.asarray(frequencies).astype(np.float32) * inverse


@dataclass(slots=True)
class _QueryTerm:
    rows: np.ndarray  # (postings,) int32, ascending
    codes: np.ndarray  # (postings,) impact codes
    scores: np.ndarray  # (codes,) float32: score of each impact code for this term
    bound: float  # the largest score of the term in any document

    def add_to(self, rows: np.ndarray, sums: np.ndarray) -> None:
        """Add the term's scores in ``rows`` (ascending) to ``sums``."""
        at = np.searchsorted(self.rows, rows)
        at[at == len(self.rows)] = 0
        hit = np.flatnonzero(self.rows[at] == rows)
        sums[hit] += self.scores[self.codes[at[hit]]]


class SearchIndex:
    """The index of a built catalogue folder; any number of processes share its pages."""

    def __init__(self, folder: Path, documents: int) -> None:
        """``documents``: number of products that have at least one term (``N`` above)."""
        self.documents = documents
        self._terms = TextColumn(folder, "terms")
        self._starts = memoryview(open_array(folder, "index.starts"))
        self._rows = open_array(folder, "index.rows")
        self._codes = open_array(folder, "index.codes")
        self._denominators = np.array(open_array(folder, "index.denominators"))
        self._best = memoryview(open_array(folder, "index.best_codes"))
        self._good = memoryview(open_array(folder, "index.good_codes"))
        self._ranks = open_array(folder, "index.asin_ranks")
        self._sums = np.zeros(len(self._ranks), dtype=np.float64)  # zero between searches
        self._in_use = False  # still so at the next search if one was cut short, by a time limit for one
        self._lock = threading.Lock()

    def search(self, query: str, *, strict: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The best 50 rows and their scores for ``query``, any text.

        Args:
            strict: raise on more than 1,024 distinct terms instead of using the first 1,024.

        Returns:
            rows: ``(results,)`` int32, best first.
            scores: ``(results,)`` float32.
        """
        counts = Counter(analyse(query))
        if len(counts) > MAX_TERMS:
            if strict:
                raise TooManyTermsError(f"the query has {len(counts)} distinct terms; the original takes {MAX_TERMS}")
            counts = Counter(dict(list(counts.items())[:MAX_TERMS]))
        with self._lock:
            return self._rank(counts)

    def _find(self, term: str) -> int | None:
        position = bisect.bisect_left(self._terms, term)
        return position if position < len(self._terms) and self._terms[position] == term else None

    def _query_terms(self, counts: Counter[str]) -> tuple[list[_QueryTerm], float]:
        """The query's indexed terms, largest bound first, and a score that at least 50 documents reach."""
        terms, reached = [], 0.0
        for term, count in counts.items():
            number = self._find(term)
            if number is None:
                continue
            start, end = self._starts[number], self._starts[number + 1]
            n = end - start
            idf = np.float32(math.log(1 + (self.documents - n + 0.5) / (n + 0.5)))
            weight = np.float32(count) * idf
            scores = weight - weight / self._denominators
            if n >= RESULTS:
                reached = max(reached, float(scores[self._good[number]]))
            bound = float(scores[self._best[number]])
            terms.append(_QueryTerm(self._rows[start:end], self._codes[start:end], scores, bound))
        terms.sort(key=lambda t: -t.bound)
        return terms, reached

    def _rank(self, counts: Counter[str]) -> tuple[np.ndarray, np.ndarray]:
        terms, reached = self._query_terms(counts)
        rest = [0.0] * (len(terms) + 1)  # rest[i]: what terms i, i+1, ... can add together
        for i in range(len(terms) - 1, -1, -1):
            rest[i] = rest[i + 1] + terms[i].bound
        found: list[np.ndarray] = []
        done = 0
        if self._in_use:
            self._sums.fill(0.0)
        self._in_use = True
        try:
            while done < len(terms) and rest[done] >= reached * _SLACK:
                self._add_all(terms[done], found)
                done += 1
                if done < len(terms) and rest[done] >= reached * _SLACK and len(terms[done].rows) > _WORTH_A_SAMPLE:
                    reached = max(reached, self._sample(found, terms[done:]))
            rows = np.concatenate(found) if found else np.zeros(0, dtype=np.int32)
            rows, sums = self._complete(rows, terms, rest, done, reached)
        finally:
            for touched in found:
                self._sums[touched] = 0.0
        self._in_use = False
        return self._best_of(rows, sums)

    def _add_all(self, term: _QueryTerm, found: list[np.ndarray]) -> None:
        """Add a term's scores to every document that has it; append the rows not touched before to ``found``."""
        sums = self._sums[term.rows]
        fresh = term.rows[sums == 0.0]
        sums += term.scores[term.codes]
        self._sums[term.rows] = sums
        if len(fresh):
            found.append(fresh)

    def _sample(self, found: list[np.ndarray], terms: list[_QueryTerm]) -> float:
        """A score that at least 50 documents reach: the 50th of the best found so far, scored in full."""
        rows = np.concatenate(found) if found else np.zeros(0, dtype=np.int32)
        if len(rows) < RESULTS:
            return 0.0
        sums = self._sums[rows]
        if len(rows) > _SAMPLE:
            best = np.argpartition(sums, len(sums) - _SAMPLE)[-_SAMPLE:]
            rows, sums = rows[best], sums[best]
        order = np.argsort(rows)
        rows, sums = rows[order], sums[order]
        for term in terms:
            term.add_to(rows, sums)
        return float(np.partition(sums, len(sums) - RESULTS)[len(sums) - RESULTS])

    def _complete(
        self, rows: np.ndarray, terms: list[_QueryTerm], rest: list[float], done: int, reached: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Full scores of the candidate rows that can still reach the first 50."""
        sums = self._sums[rows]
        for i in range(done, len(terms) + 1):
            if len(sums) > RESULTS:
                kth = float(np.partition(sums, len(sums) - RESULTS)[len(sums) - RESULTS])
                reached = max(reached, kth)
                keep = sums + rest[i] >= reached * _SLACK
                rows, sums = rows[keep], sums[keep]
            if i == len(terms) or not len(rows):
                break
            term = terms[i]
            if i == done:
                order = np.argsort(rows)
                rows, sums = rows[order], sums[order]
            term.add_to(rows, sums)
        return rows, sums

    def _best_of(self, rows: np.ndarray, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores = sums.astype(np.float32)
        if len(scores) > RESULTS:
            kth = np.partition(scores, len(scores) - RESULTS)[len(scores) - RESULTS]
            keep = scores >= kth
            rows, scores = rows[keep], scores[keep]
        order = np.lexsort((self._ranks[rows], -scores))[:RESULTS]
        return rows[order], scores[order]
