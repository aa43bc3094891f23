"""What a figure gets to work with."""

import dataclasses

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.estimates import Estimates
from oled_jax.bench.paper.subject import Job, Measured, Subject, Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A subject, and the simulator over its traces."""

    subject: Subject
    estimates: Estimates

    @property
    def quick(self) -> bool:
        """Less of everything."""
        return self.subject.settings.quick

    @property
    def works(self) -> list[Work]:
        """One for each workload."""
        return [Work(workload=name) for name in self.subject.workloads]

    @property
    def capacities(self) -> list[int]:
        """The paper's two, as far as the device has room."""
        chosen = lineup.capacities(self.subject.config.num_experts)
        return [capacity for capacity in chosen if capacity <= self.subject.largest_capacity]

    @property
    def references(self) -> list[str]:
        """`all`, where the device has room for every expert."""
        fits = self.subject.largest_capacity == self.subject.config.num_experts
        return [lineup.reference()] if fits else []

    def job(self, policy: str, capacity: int, work: Work, *, cpu: bool = False, replayed: bool = False) -> Job:
        """Policy `all` has one capacity, whatever is said; and what replays anyway is one job, said or not."""
        if policy == lineup.reference():
            capacity = self.subject.config.num_experts
        job = Job(policy=policy, capacity=capacity, work=work, cpu=cpu)
        return job if self.subject.replays(job) else dataclasses.replace(job, replayed=replayed)

    def measure(self, policy: str, capacity: int, work: Work, *, cpu: bool = False, replayed: bool = False) -> Measured:
        """One job by itself, unless it was measured before."""
        return self.subject.measure([self.job(policy, capacity, work, cpu=cpu, replayed=replayed)])[0]

    def sweep(self, shares: tuple[float, ...]) -> list[int]:
        """Capacities at shares of a layer's experts, the paper's two among them, as far as the device has room."""
        experts = self.subject.config.num_experts
        wanted = {max(1, round(share * experts)) for share in shares} | set(self.capacities)
        return sorted(capacity for capacity in wanted if capacity <= self.subject.largest_capacity)
