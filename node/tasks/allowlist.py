"""The reasoning-gym data sets that a domain may name, and which of them may load without a sandbox.

1. A data set is admitted with the module that defines it, so that a child imports only what its tasks need (15 MB
   instead of 110 MB for ``chain_sum``), and with what its scorer does to a response (``Scorer``). The table was made by
   reading the scorers of ``REASONING_GYM_VERSION`` and trying hostile answers on each; a test does the latter again.
2. Nine scorers hand the response to ``eval`` or to sympy's parser, which evaluates as well: ``LITERAL``,
   ``ARITHMETIC`` and ``EXPRESSION``. They load inside a sandbox only, and read no answer beyond the form that
   ``node.tasks.answer_bounds`` allows them.
3. ``UNSANDBOXED`` is what remains where there is no sandbox: scorers that compare texts or read numbers, JSON or
   lines with a parser that cannot run code and whose time is bounded by the answer's length.
4. ``REFUSED`` names data sets that reasoning-gym has and no domain may use, each with the reason.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

REASONING_GYM_VERSION: Final = "0.1.25"


class Scorer(enum.Enum):
    """What a scorer does to a response."""

    COMPARES = "compares texts"
    READS = "reads numbers, JSON or lines with a parser that runs no code"
    FRACTION = "reads a fraction, all of whose digits it computes"
    LITERAL = "evaluates a Python list"
    ARITHMETIC = "evaluates a sum with sympy"
    EXPRESSION = "evaluates algebra with sympy"


@dataclass(frozen=True, slots=True)
class DataSet:
    """An admitted data set. ``module`` is relative to ``reasoning_gym``; only a ``finite`` one has as many items as its
    parameter ``size`` says.
    """

    module: str
    scorer: Scorer
    finite: bool = False


_NAMES: Final[Mapping[Scorer, Mapping[str, str]]] = {
    Scorer.COMPARES: {
        "algebra": "simple_equations",
        "algorithmic": (
            "ab base_conversion binary_alternation caesar_cipher count_primes isomorphic_strings letter_counting "
            "letter_jumble manipulate_matrix number_filtering palindrome_generation ransom_note rotate_matrix "
            "rotten_oranges sentence_reordering spell_backward string_manipulation string_splitting "
            "string_synthesis word_ladder word_sequence_reversal word_sorting"
        ),
        "arc": "arc_1d arc_agi rearc",
        "arithmetic": "basic_arithmetic count_bits dice gcd lcm leg_counting",
        "code": "bf",
        "cognition": "color_cube_rotation figlet_font modulo_grid needle_haystack number_sequence",
        "games": "emoji_mystery mahjong_puzzle maze tsumego",
        "geometry": "simple_geometry",
        "graphs": "course_schedule family_relationships largest_island path_star shortest_path",
        "induction": "acre list_functions",
        "logic": "aiw circuit_logic self_reference syllogism zebra_puzzles",
    },
    Scorer.READS: {
        "algebra": "complex_arithmetic polynomial_equations",
        "algorithmic": (
            "cryptarithm game_of_life graph_color group_anagrams jugs number_sorting palindrome_partitioning "
            "pool_matrix"
        ),
        "arithmetic": (
            "bitwise_arithmetic calendar_arithmetic chain_sum decimal_arithmetic decimal_chain_sum "
            "fraction_simplification gsm_symbolic number_format power_function prime_factorization products "
            "time_intervals"
        ),
        "code": "codeio",
        "cognition": "rectangle_count rubiks_cube",
        "games": "boxnet futoshiki kakurasu knight_swap mini_sudoku rush_hour sokoban sudoku survo tower_of_hanoi",
        "geometry": "advanced_geometry",
        "graphs": "quantum_lock",
        "logic": "knights_knaves propositional_logic",
    },
    Scorer.FRACTION: {"probability": "coin_flip"},
    Scorer.LITERAL: {
        "algorithmic": "binary_matrix spiral_matrix string_insertion",
        "games": "n_queens",
    },
    Scorer.ARITHMETIC: {"games": "countdown puzzle24"},
    Scorer.EXPRESSION: {"algebra": "intermediate_integration polynomial_multiplication simple_integration"},
}
"""The data sets that may be named, by scorer and category: reasoning-gym's package of that name."""

_ODD_MODULES: Final[Mapping[str, str]] = {
    "acre": "acre.acre",
    "figlet_font": "figlet_fonts",
    "gsm_symbolic": "gsm_symbolic.gsm_symbolic",
    "list_functions": "list_functions.list_functions",
    "mahjong_puzzle": "mahjong",
    "number_sequence": "number_sequences",
    "syllogism": "syllogisms",
}
"""Data sets whose module within their category is not called as they are."""

_FINITE: Final = frozenset({"acre", "gsm_symbolic", "list_functions", "word_ladder"})

DATASETS: Final[Mapping[str, DataSet]] = MappingProxyType(
    {
        name: DataSet(f"{category}.{_ODD_MODULES.get(name, name)}", scorer, name in _FINITE)
        for scorer, categories in _NAMES.items()
        for category, names in categories.items()
        for name in names.split()
    }
)

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "composite": "it mixes data sets itself, and a domain's tasks already are a mix",
        "game_of_life_halting": "its scorer takes every answer for a right one",
    }
)

UNSANDBOXED: Final = frozenset(
    name for name, data_set in DATASETS.items() if data_set.scorer in (Scorer.COMPARES, Scorer.READS)
)
