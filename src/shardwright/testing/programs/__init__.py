"""A fuzzer of programs: random torch code runs on plain tensors and on DTensors, and is compared after every step."""

from shardwright.testing.programs.fuzzing import Fuzzing, fuzz
from shardwright.testing.programs.generate import generate
from shardwright.testing.programs.judge import Judgement, Verdict, judge
from shardwright.testing.programs.minimise import minimise
from shardwright.testing.programs.program import Program
from shardwright.testing.programs.replay import replay

__all__ = ["Fuzzing", "Judgement", "Program", "Verdict", "fuzz", "generate", "judge", "minimise", "replay"]
