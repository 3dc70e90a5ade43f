"""What a lesson says of a kernel that runs in the interpreter for TPUs; notebook 15 shows a race and a second visit."""

from helpers.instruments.tpu_interpreter import complaint


def test_nothing_to_complain_of():
    assert complaint(lambda: print("RACES ARE NEVER MENTIONED")) is None


def test_any_other_error_is_said_in_a_line():
    assert complaint(lambda: 1 / 0) == "division by zero"


def test_a_race_of_an_old_jax_is_printed():
    text = "RACE DETECTED\n  write of ('hbm', 1)[0] from (0, 1), here\n  read of ('hbm', 1)[0] from (0, 0), there\n"
    said = "a race: nothing puts a write of one core and a read of the other in order"
    assert complaint(lambda: print(text)) == said
