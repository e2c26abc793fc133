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


DATASETS: Final[Mapping[str, DataSet]] = MappingProxyType(
    {
        "ab": DataSet("algorithmic.ab", Scorer.COMPARES),
        "acre": DataSet("induction.acre.acre", Scorer.COMPARES, finite=True),
        "advanced_geometry": DataSet("geometry.advanced_geometry", Scorer.READS),
        "aiw": DataSet("logic.aiw", Scorer.COMPARES),
        "arc_1d": DataSet("arc.arc_1d", Scorer.COMPARES),
        "arc_agi": DataSet("arc.arc_agi", Scorer.COMPARES),
        "base_conversion": DataSet("algorithmic.base_conversion", Scorer.COMPARES),
        "basic_arithmetic": DataSet("arithmetic.basic_arithmetic", Scorer.COMPARES),
        "bf": DataSet("code.bf", Scorer.COMPARES),
        "binary_alternation": DataSet("algorithmic.binary_alternation", Scorer.COMPARES),
        "binary_matrix": DataSet("algorithmic.binary_matrix", Scorer.LITERAL),
        "bitwise_arithmetic": DataSet("arithmetic.bitwise_arithmetic", Scorer.READS),
        "boxnet": DataSet("games.boxnet", Scorer.READS),
        "caesar_cipher": DataSet("algorithmic.caesar_cipher", Scorer.COMPARES),
        "calendar_arithmetic": DataSet("arithmetic.calendar_arithmetic", Scorer.READS),
        "chain_sum": DataSet("arithmetic.chain_sum", Scorer.READS),
        "circuit_logic": DataSet("logic.circuit_logic", Scorer.COMPARES),
        "codeio": DataSet("code.codeio", Scorer.READS),
        "coin_flip": DataSet("probability.coin_flip", Scorer.FRACTION),
        "color_cube_rotation": DataSet("cognition.color_cube_rotation", Scorer.COMPARES),
        "complex_arithmetic": DataSet("algebra.complex_arithmetic", Scorer.READS),
        "count_bits": DataSet("arithmetic.count_bits", Scorer.COMPARES),
        "count_primes": DataSet("algorithmic.count_primes", Scorer.COMPARES),
        "countdown": DataSet("games.countdown", Scorer.ARITHMETIC),
        "course_schedule": DataSet("graphs.course_schedule", Scorer.COMPARES),
        "cryptarithm": DataSet("algorithmic.cryptarithm", Scorer.READS),
        "decimal_arithmetic": DataSet("arithmetic.decimal_arithmetic", Scorer.READS),
        "decimal_chain_sum": DataSet("arithmetic.decimal_chain_sum", Scorer.READS),
        "dice": DataSet("arithmetic.dice", Scorer.COMPARES),
        "emoji_mystery": DataSet("games.emoji_mystery", Scorer.COMPARES),
        "family_relationships": DataSet("graphs.family_relationships", Scorer.COMPARES),
        "figlet_font": DataSet("cognition.figlet_fonts", Scorer.COMPARES),
        "fraction_simplification": DataSet("arithmetic.fraction_simplification", Scorer.READS),
        "futoshiki": DataSet("games.futoshiki", Scorer.READS),
        "game_of_life": DataSet("algorithmic.game_of_life", Scorer.READS),
        "gcd": DataSet("arithmetic.gcd", Scorer.COMPARES),
        "graph_color": DataSet("algorithmic.graph_color", Scorer.READS),
        "group_anagrams": DataSet("algorithmic.group_anagrams", Scorer.READS),
        "gsm_symbolic": DataSet("arithmetic.gsm_symbolic.gsm_symbolic", Scorer.READS, finite=True),
        "intermediate_integration": DataSet("algebra.intermediate_integration", Scorer.EXPRESSION),
        "isomorphic_strings": DataSet("algorithmic.isomorphic_strings", Scorer.COMPARES),
        "jugs": DataSet("algorithmic.jugs", Scorer.READS),
        "kakurasu": DataSet("games.kakurasu", Scorer.READS),
        "knight_swap": DataSet("games.knight_swap", Scorer.READS),
        "knights_knaves": DataSet("logic.knights_knaves", Scorer.READS),
        "largest_island": DataSet("graphs.largest_island", Scorer.COMPARES),
        "lcm": DataSet("arithmetic.lcm", Scorer.COMPARES),
        "leg_counting": DataSet("arithmetic.leg_counting", Scorer.COMPARES),
        "letter_counting": DataSet("algorithmic.letter_counting", Scorer.COMPARES),
        "letter_jumble": DataSet("algorithmic.letter_jumble", Scorer.COMPARES),
        "list_functions": DataSet("induction.list_functions.list_functions", Scorer.COMPARES, finite=True),
        "mahjong_puzzle": DataSet("games.mahjong", Scorer.COMPARES),
        "manipulate_matrix": DataSet("algorithmic.manipulate_matrix", Scorer.COMPARES),
        "maze": DataSet("games.maze", Scorer.COMPARES),
        "mini_sudoku": DataSet("games.mini_sudoku", Scorer.READS),
        "modulo_grid": DataSet("cognition.modulo_grid", Scorer.COMPARES),
        "n_queens": DataSet("games.n_queens", Scorer.LITERAL),
        "needle_haystack": DataSet("cognition.needle_haystack", Scorer.COMPARES),
        "number_filtering": DataSet("algorithmic.number_filtering", Scorer.COMPARES),
        "number_format": DataSet("arithmetic.number_format", Scorer.READS),
        "number_sequence": DataSet("cognition.number_sequences", Scorer.COMPARES),
        "number_sorting": DataSet("algorithmic.number_sorting", Scorer.READS),
        "palindrome_generation": DataSet("algorithmic.palindrome_generation", Scorer.COMPARES),
        "palindrome_partitioning": DataSet("algorithmic.palindrome_partitioning", Scorer.READS),
        "path_star": DataSet("graphs.path_star", Scorer.COMPARES),
        "polynomial_equations": DataSet("algebra.polynomial_equations", Scorer.READS),
        "polynomial_multiplication": DataSet("algebra.polynomial_multiplication", Scorer.EXPRESSION),
        "pool_matrix": DataSet("algorithmic.pool_matrix", Scorer.READS),
        "power_function": DataSet("arithmetic.power_function", Scorer.READS),
        "prime_factorization": DataSet("arithmetic.prime_factorization", Scorer.READS),
        "products": DataSet("arithmetic.products", Scorer.READS),
        "propositional_logic": DataSet("logic.propositional_logic", Scorer.READS),
        "puzzle24": DataSet("games.puzzle24", Scorer.ARITHMETIC),
        "quantum_lock": DataSet("graphs.quantum_lock", Scorer.READS),
        "ransom_note": DataSet("algorithmic.ransom_note", Scorer.COMPARES),
        "rearc": DataSet("arc.rearc", Scorer.COMPARES),
        "rectangle_count": DataSet("cognition.rectangle_count", Scorer.READS),
        "rotate_matrix": DataSet("algorithmic.rotate_matrix", Scorer.COMPARES),
        "rotten_oranges": DataSet("algorithmic.rotten_oranges", Scorer.COMPARES),
        "rubiks_cube": DataSet("cognition.rubiks_cube", Scorer.READS),
        "rush_hour": DataSet("games.rush_hour", Scorer.READS),
        "self_reference": DataSet("logic.self_reference", Scorer.COMPARES),
        "sentence_reordering": DataSet("algorithmic.sentence_reordering", Scorer.COMPARES),
        "shortest_path": DataSet("graphs.shortest_path", Scorer.COMPARES),
        "simple_equations": DataSet("algebra.simple_equations", Scorer.COMPARES),
        "simple_geometry": DataSet("geometry.simple_geometry", Scorer.COMPARES),
        "simple_integration": DataSet("algebra.simple_integration", Scorer.EXPRESSION),
        "sokoban": DataSet("games.sokoban", Scorer.READS),
        "spell_backward": DataSet("algorithmic.spell_backward", Scorer.COMPARES),
        "spiral_matrix": DataSet("algorithmic.spiral_matrix", Scorer.LITERAL),
        "string_insertion": DataSet("algorithmic.string_insertion", Scorer.LITERAL),
        "string_manipulation": DataSet("algorithmic.string_manipulation", Scorer.COMPARES),
        "string_splitting": DataSet("algorithmic.string_splitting", Scorer.COMPARES),
        "string_synthesis": DataSet("algorithmic.string_synthesis", Scorer.COMPARES),
        "sudoku": DataSet("games.sudoku", Scorer.READS),
        "survo": DataSet("games.survo", Scorer.READS),
        "syllogism": DataSet("logic.syllogisms", Scorer.COMPARES),
        "time_intervals": DataSet("arithmetic.time_intervals", Scorer.READS),
        "tower_of_hanoi": DataSet("games.tower_of_hanoi", Scorer.READS),
        "tsumego": DataSet("games.tsumego", Scorer.COMPARES),
        "word_ladder": DataSet("algorithmic.word_ladder", Scorer.COMPARES, finite=True),
        "word_sequence_reversal": DataSet("algorithmic.word_sequence_reversal", Scorer.COMPARES),
        "word_sorting": DataSet("algorithmic.word_sorting", Scorer.COMPARES),
        "zebra_puzzles": DataSet("logic.zebra_puzzles", Scorer.COMPARES),
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
