"""`headrace env check`: what is wrong with an environment, found before a run does, and how to mend it."""

from headrace.deploy.environment_check.checking import Finding, Outcome, Report, check_environment

__all__ = ["Finding", "Outcome", "Report", "check_environment"]
