"""Building the inverted index: postings of every term, grouped by term, written without holding them all in memory.

Documents are the catalogue's rows. A posting is a row (int32) and an *impact code* (uint16 or uint32): the number of
the pair (term frequency, coded document length) when all pairs that occur are sorted by BM25 impact, so a larger code
is a larger score whatever the query. See :mod:`.search` for the formula.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from typing import BinaryIO

import numpy as np

from agent_system.environments.env_package.webshop.analysis import analyse
from agent_system.environments.env_package.webshop.search import (
    EXACT_LENGTHS,
    RESULTS,
    encode_length,
    impact_denominators,
)
from agent_system.environments.env_package.webshop.storage import (
    ArrayWriter,
    TextColumnWriter,
    save_array,
)

logger = logging.getLogger(__name__)

_CHUNK_POSTINGS = 1 << 21
_MAX_FREQUENCY = (1 << 16) - 1


class IndexBuilder:
    """Collects documents in row order; :meth:`finish` writes the index into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._term_ids: dict[str, int] = {}
        self._lengths: list[int] = []  # tokens per document
        self._sizes: list[int] = []  # distinct terms per document
        self._terms: list[int] = []
        self._frequencies: list[int] = []
        self._chunks: list[tuple[int, int]] = []  # (documents, postings) per spilled chunk
        self._spilled_documents = 0
        self._spill_path = folder / "spill.tmp"
        self._spill: BinaryIO = self._spill_path.open("w+b")

    def add(self, text: str) -> None:
        """Index one document; its row is the number of documents before it."""
        counts = Counter(analyse(text))
        ids = self._term_ids
        self._lengths.append(sum(counts.values()))
        self._sizes.append(len(counts))
        self._terms.extend([ids.setdefault(term, len(ids)) for term in counts])
        self._frequencies.extend(counts.values())
        if len(self._terms) >= _CHUNK_POSTINGS:
            self._spill_chunk()

    def _spill_chunk(self) -> None:
        self._spill.write(np.asarray(self._terms, dtype=np.int32).data)
        self._spill.write(np.minimum(np.asarray(self._frequencies, dtype=np.int64), _MAX_FREQUENCY).astype("u2").data)
        documents = len(self._sizes) - self._spilled_documents
        self._chunks.append((documents, len(self._terms)))
        self._spilled_documents = len(self._sizes)
        self._terms, self._frequencies = [], []

    def finish(self, asins: list[str]) -> dict[str, int]:
        """Write the index; ``asins`` (one per document) decide the order of equal scores."""
        assert len(asins) == len(self._lengths), "one asin per document"
        self._spill_chunk()
        lengths = np.asarray(self._lengths, dtype=np.int64)
        terms = sorted(self._term_ids)
        final_ids = np.empty(len(terms), dtype=np.int32)
        final_ids[[self._term_ids[term] for term in terms]] = np.arange(len(terms), dtype=np.int32)
        column = TextColumnWriter(self._folder, "terms")
        for term in terms:
            column.append(term)
        column.close()

        length_codes = encode_length(lengths)
        document_frequencies, pairs = self._survey(final_ids, length_codes)
        denominators, code_of_pair = self._number_pairs(pairs, lengths)
        starts = np.zeros(len(terms) + 1, dtype=np.int64)
        np.cumsum(document_frequencies, out=starts[1:])
        self._scatter(final_ids, length_codes, starts, code_of_pair, len(denominators))
        order = sorted(range(len(asins)), key=lambda row: asins[row].encode("utf-8", "surrogatepass"))
        ranks = np.empty(len(asins), dtype=np.int32)
        ranks[order] = np.arange(len(asins), dtype=np.int32)
        save_array(self._folder, "index.starts", starts)
        save_array(self._folder, "index.denominators", denominators)
        save_array(self._folder, "index.asin_ranks", ranks)
        self._save_bounds(starts)
        self._spill.close()
        self._spill_path.unlink()
        return {"documents": int(np.count_nonzero(lengths)), "terms": len(terms), "postings": int(starts[-1])}

    def _read_chunk(self, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Provisional term ids, frequencies and rows of the postings of one chunk."""
        before = sum(postings for _, postings in self._chunks[:chunk])
        first = sum(documents for documents, _ in self._chunks[:chunk])
        documents, postings = self._chunks[chunk]
        self._spill.seek(before * 6)
        terms = np.frombuffer(self._spill.read(postings * 4), dtype=np.int32)
        frequencies = np.frombuffer(self._spill.read(postings * 2), dtype=np.uint16)
        sizes = self._sizes[first : first + documents]
        rows = np.repeat(np.arange(first, first + documents, dtype=np.int32), sizes)
        return terms, frequencies, rows

    def _survey(self, final_ids: np.ndarray, length_codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Document frequency of each term, and every (frequency, length code) pair packed as ``f << 8 | code``."""
        document_frequencies = np.zeros(len(final_ids), dtype=np.int64)
        pairs = np.zeros(0, dtype=np.int64)
        for chunk in range(len(self._chunks)):
            terms, frequencies, rows = self._read_chunk(chunk)
            document_frequencies += np.bincount(final_ids[terms], minlength=len(final_ids))
            pairs = np.union1d(pairs, _pack(frequencies, length_codes[rows]))
        return document_frequencies, pairs

    def _number_pairs(self, pairs: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """BM25 denominators in impact order, and the code of each packed pair (a dense table)."""
        documents = max(int(np.count_nonzero(lengths)), 1)
        average = np.float32(float(lengths.sum()) / documents)
        denominators = impact_denominators(pairs >> 8, (pairs & 0xFF).astype(np.uint8), average)
        order = np.argsort(denominators, kind="stable")
        table = np.zeros(int(pairs.max(initial=0)) + 1, dtype=np.uint32)
        table[pairs[order]] = np.arange(len(pairs), dtype=np.uint32)
        return denominators[order], table

    def _scatter(
        self, final_ids: np.ndarray, length_codes: np.ndarray, starts: np.ndarray, code_of_pair: np.ndarray, codes: int
    ) -> None:
        """Second pass: put every posting behind those of the same term with smaller rows."""
        total = int(starts[-1])
        code_type = np.uint16 if codes <= 1 << 16 else np.uint32
        for name, dtype in (("index.rows", np.int32), ("index.codes", code_type)):
            writer = ArrayWriter(self._folder / f"{name}.npy", dtype)
            writer.length = total
            writer.close()
            with (self._folder / f"{name}.npy").open("r+b") as handle:
                # Reserved, not only declared: a full disk is an error here and would be a fatal signal in the mapping.
                os.posix_fallocate(handle.fileno(), 0, 128 + total * np.dtype(dtype).itemsize)
        if total == 0:
            return
        out_rows = np.load(self._folder / "index.rows.npy", mmap_mode="r+")
        out_codes = np.load(self._folder / "index.codes.npy", mmap_mode="r+")
        cursor = starts[:-1].copy()
        for chunk in range(len(self._chunks)):
            terms, frequencies, rows = self._read_chunk(chunk)
            ids = final_ids[terms]
            order = np.argsort(ids, kind="stable")
            ids = ids[order]
            present, first, counts = np.unique(ids, return_index=True, return_counts=True)
            within = np.arange(len(ids)) - np.repeat(first, counts)
            target = np.repeat(cursor[present], counts) + within
            cursor[present] += counts
            out_rows[target] = rows[order]
            out_codes[target] = code_of_pair[_pack(frequencies, length_codes[rows])][order]
        out_rows.flush()
        out_codes.flush()

    def _save_bounds(self, starts: np.ndarray) -> None:
        """Per term the largest impact code, and the RESULTS-th largest (0 for rarer terms): bounds for pruning."""
        terms = len(starts) - 1
        best = np.zeros(terms, dtype=np.uint32)
        good = np.zeros(terms, dtype=np.uint32)
        if terms:
            codes = np.load(self._folder / "index.codes.npy", mmap_mode="r").view(np.ndarray)
            best[:] = np.maximum.reduceat(codes, starts[:-1])
            for term in np.flatnonzero(np.diff(starts) >= RESULTS):
                of_term = codes[starts[term] : starts[term + 1]]
                good[term] = np.partition(of_term, len(of_term) - RESULTS)[len(of_term) - RESULTS]
        save_array(self._folder, "index.best_codes", best)
        save_array(self._folder, "index.good_codes", good)


def _pack(frequencies: np.ndarray, length_codes: np.ndarray) -> np.ndarray:
    return (frequencies.astype(np.int64) << 8) | length_codes


assert EXACT_LENGTHS < 256
