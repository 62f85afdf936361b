"""Config file of the runs that tests start on the command line."""

from tests.training.toys import get_config

__all__ = ["get_config"]
