"""Measures, statistics and rules that turn a plan's runs into verdicts on its claims."""

from suite.judge.judging import blocker, is_exact, judge, judge_claim
from suite.judge.verdict import Verdict

__all__ = ["Verdict", "blocker", "is_exact", "judge", "judge_claim"]
