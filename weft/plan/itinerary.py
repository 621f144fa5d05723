"""Itinerary: what each iteration of a job does, from the spec and the sizes of its data alone.

The iteration graph is the same for every iteration, so training and validation iterations run through it alike: in a
validation iteration FORWARD runs without gradients, BACKWARD and UPDATE pass at once. Which is which, and which samples
it takes, is a pure function of the iteration's number, here, so that the daemon and every worker agree unasked.

    epochs = 2, 250 training and 120 validation samples, batch 100:
    iteration  0    1    2    3    4    5    6    7    8    9
    phase      T    T    T    V    V    T    T    T    V    V
    step       0    1    2    -    -    3    4    5    -    -
    samples   100  100   50  100   20  100  100   50  100   20
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.spec.job_spec import JobSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    index: int  # in the job, from 0
    training: bool  # over the training data
    epoch: int
    step: int  # among training iterations; of a validation, the steps done
    start: int  # of its samples, in the epoch's order
    size: int
    last_of_validation: bool = False
    learns: bool = True  # with gradients and an update
    ends_epoch: bool = False  # the last step of its epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Itinerary:
    num_train: int  # samples of an epoch
    num_validation: int
    batch_size: int
    steps: int  # training iterations in all
    forward_only: bool = False  # none of them learns
    per_pass: int = 0  # samples of a pass over the training data, where an epoch is none; 0 where it is one

    @classmethod
    def of(
        cls,
        *,
        num_train: int,
        num_validation: int,
        batch_size: int,
        epochs: int | None,
        steps: int | None,
        steps_per_epoch: int | None = None,
        forward_only: bool = False,
    ) -> Itinerary:
        """num_train: samples of a pass. steps_per_epoch: of an epoch that is none. A job that only runs forward does so
        over the training data, and validates nothing."""
        per_epoch = steps_per_epoch or -(-num_train // batch_size)
        return cls(
            num_train=num_train if steps_per_epoch is None else steps_per_epoch * batch_size,
            per_pass=0 if steps_per_epoch is None else num_train,
            num_validation=0 if forward_only else num_validation,
            batch_size=batch_size,
            steps=steps if steps is not None else (epochs or 0) * per_epoch,
            forward_only=forward_only,
        )

    @classmethod
    def of_job(cls, job: JobSection, num_train: int, num_validation: int) -> Itinerary:
        """As its spec has it."""
        return cls.of(
            num_train=num_train,
            num_validation=num_validation,
            batch_size=job.batch_size,
            epochs=job.epochs,
            steps=job.steps,
            steps_per_epoch=job.steps_per_epoch,
            forward_only=job.mode == "forward",
        )

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_train // self.batch_size)

    @property
    def full_batch(self) -> int:
        """Samples of a whole batch: as many as there are at the most."""
        return min(self.batch_size, self.num_train)

    @property
    def samples_per_step(self) -> float:
        """On average: the last batch of an epoch has what is left."""
        return self.num_train / self.steps_per_epoch

    @property
    def validations_per_epoch(self) -> int:
        return -(-self.num_validation // self.batch_size)

    @property
    def num_iterations(self) -> int:
        """Training and validation iterations; an unfinished last epoch is validated too."""
        return self.steps + -(-self.steps // self.steps_per_epoch) * self.validations_per_epoch

    def at(self, index: int) -> Iteration:
        """Raises IndexError outside 0 <= index < num_iterations."""
        if not 0 <= index < self.num_iterations:
            raise IndexError(f"iteration {index} of {self.num_iterations}")
        epoch, within = divmod(index, self.steps_per_epoch + self.validations_per_epoch)
        steps_here = min(self.steps_per_epoch, self.steps - epoch * self.steps_per_epoch)
        training = within < steps_here
        number = within if training else within - steps_here
        start = number * self.batch_size
        total = self.num_train if training else self.num_validation
        step = epoch * self.steps_per_epoch + (within if training else steps_here)
        return Iteration(
            index=index,
            training=training,
            epoch=epoch,
            step=step,
            start=start,
            size=min(self.batch_size, total - start),
            last_of_validation=not training and number == self.validations_per_epoch - 1,
            learns=training and not self.forward_only,
            ends_epoch=training and (step + 1) % self.steps_per_epoch == 0,
        )

    def update_of(self, step: int) -> int:
        """The iteration whose update is the `step`-th, counted from 1; -1 for none."""
        if step == 0:
            return -1
        epoch, within = divmod(step - 1, self.steps_per_epoch)
        return epoch * (self.steps_per_epoch + self.validations_per_epoch) + within

    def steps_done(self, iterations: int) -> int:
        """Training steps among so many first iterations."""
        if iterations == 0:
            return 0
        last = self.at(iterations - 1)
        return last.step + 1 if last.training else last.step

    def end_of_epoch(self, index: int) -> int:
        """The iteration with which the next epoch begins, its validation behind it; the job's end after the last."""
        per_epoch = self.steps_per_epoch + self.validations_per_epoch
        return min((index // per_epoch + 1) * per_epoch, self.num_iterations)

    def label(self, index: int) -> str:
        """For people, who count training steps from 1: `step 126`, `validation after step 63`. Of what is no iteration
        of the job its number. The page's JavaScript (`Timeline.label`) says the same."""
        if not 0 <= index < self.num_iterations:
            return f"iteration {index}"
        about = self.at(index)
        if about.training:
            return f"step {about.step + 1}"
        number = about.start // self.batch_size + 1
        which = f" {number} of {self.validations_per_epoch}" if self.validations_per_epoch > 1 else ""
        return f"validation{which} after step {about.step}"

    def batch_sizes(self) -> set[int]:
        """Every batch size that occurs, ragged last batches included."""
        sizes = {min(self.batch_size, self.num_train), min(self.batch_size, self.num_validation)}
        sizes.add(self.num_validation % self.batch_size)
        if self.steps >= self.steps_per_epoch:
            sizes.add(self.num_train % self.batch_size)
        return sizes - {0}


def microbatch_sizes(size: int, num_microbatches: int) -> list[int]:
    """Sizes of the parts that `torch.tensor_split` makes of `size` samples; some may be 0."""
    small, larger = divmod(size, num_microbatches)
    return [small + 1] * larger + [small] * (num_microbatches - larger)
