"""The report: a static site over plans and stored results. Templates and styles live in site/."""

from suite.report.build import build_site

__all__ = ["build_site"]
