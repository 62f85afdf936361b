"""Problems whose answers can be checked: domains, their train and held-out splits, and the adaptive curriculum."""

from rlvr_jax.tasks import domains as domains
from rlvr_jax.tasks.curriculum import Curriculum as Curriculum
from rlvr_jax.tasks.curriculum import TaskBatch as TaskBatch
from rlvr_jax.tasks.curriculum import task_sampler as task_sampler
from rlvr_jax.tasks.registry import DOMAINS as DOMAINS
from rlvr_jax.tasks.registry import Domain as Domain
from rlvr_jax.tasks.registry import Draft as Draft
from rlvr_jax.tasks.registry import VerifierUse as VerifierUse
from rlvr_jax.tasks.registry import ask as ask
from rlvr_jax.tasks.registry import domain as domain
from rlvr_jax.tasks.registry import expand_domains as expand_domains
from rlvr_jax.tasks.splits import draw as draw
from rlvr_jax.tasks.splits import held_out_tasks as held_out_tasks
from rlvr_jax.tasks.splits import make_task as make_task
from rlvr_jax.tasks.splits import split_of as split_of
