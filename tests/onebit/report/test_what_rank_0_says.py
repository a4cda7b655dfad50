"""What a run says by itself: of steps that are skipped again and again, of attach that was forgotten, of its stage."""

import logging
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.kernels.log import tell, to_log
from onebit.optim import run as run_module
from onebit.optim import stages
from onebit.optimizers import optimizer as front
from onebit.parallel import flight
from onebit.report import pay_off, skips
from onebit.warning import warn
from tests.collectives.work import logged
from tests.onebit.optim.contract import started
from tests.onebit.runs import Case, adamw_state, kinds, on_ranks, on_warnings, run, take
from tests.ranks import group


def said(rank, case, steps):
    """Warnings by step, and the report."""
    (params, optimizer), texts = started(case, 0, rank, 2), {}
    for step in range(1, steps + 1):
        with on_warnings() as caught:
            take(case, rank, optimizer, params, step)
        if caught:
            texts[step] = caught[0]
    return texts, optimizer.report()


@kinds
@on_ranks(2)
def test_a_rank_with_nan_for_ever_is_named(rank, kind):
    """Rank 0 names it, in the step after the third and the tenth that were skipped, and by the report first."""
    bad = tuple((step, 1, float("nan")) for step in (3, *range(7, 30)))
    texts, report = said(rank, Case(kind, shapes=((7, 9), (33,)), options={"freeze_step": 4}, bad=bad), 20)
    assert list(texts) == ([10, 17] if rank == 0 else [])
    if rank == 0:
        reason = "steps in a row were skipped: gradients are not finite on rank 1; the first is that of 1"
        assert f"3 {reason}" in texts[10] and "10 steps in a row" in texts[17]
        assert report.verdict.startswith("15 of 20 steps were skipped")
        assert "skipped            15 of these" in str(report)


def frozen(params):
    for p in params:
        p.requires_grad_(False)


SILENT = {  # what is done to the parameters, the step that warns, and its words
    "all are frozen": (frozen, 1, ("2 of 2 parameters", "no step changes anything", "optimizer_cls_and_kwargs=")),
    "one is frozen": (lambda params: frozen(params[1:]), 1, ("1 of 2 parameters (1 of", "were frozen", "do not train")),
    "one has no gradient": (None, 5, ("1 of 2 parameters (1 of", "no gradient in 5 steps", "do not train")),
}


@pytest.mark.parametrize("what", SILENT)
@on_ranks(2)
def test_parameters_that_do_not_train_are_one_warning(rank, what):
    change, due, words = SILENT[what]
    missing = () if change else tuple((step, r, 1) for step in range(1, 20) for r in (0, 1))
    case = Case(shapes=((7, 9), (33,)), options={"freeze_step": 4}, missing=missing)
    (params, optimizer), texts = started(case, 0, rank, 2), {}
    if change:
        change(params)
    for step in range(1, 9):
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = g if p.requires_grad else None
        with on_warnings() as caught:
            optimizer.step()
        texts |= {step: caught[0]} if caught else {}
    assert list(texts) == ([due] if rank == 0 else [])
    assert rank or all(word in texts[due] for word in words), texts


def test_a_parameter_without_a_gradient_now_and_then_is_no_warning():
    missing = tuple((step, 0, 1) for step in (1, 2, 4, 5, 6, 7))
    with on_warnings() as caught:
        started(Case(shapes=((7, 9), (33,)), options={"freeze_step": 4}, missing=missing), 8)
    assert not caught


@on_ranks(2)
def test_so_is_one_whose_gradients_are_finite_and_too_large(rank):
    bad = tuple((step, 1, 2.0**42) for step in range(3, 30))
    texts, _ = said(rank, Case(shapes=((7, 9), (33,)), options={"freeze_step": 2}, bad=bad), 8)
    assert list(texts) == ([6] if rank == 0 else [])
    assert rank > 0 or "3 steps in a row were skipped: gradients are beyond 2^40 on rank 1" in texts[6]


@on_ranks(2)
def test_scaled_gradients_are_too_large_by_what_they_are_without_the_scale(rank):
    case = Case(shapes=((7, 9), (33,)), options={"freeze_step": 2})
    params, optimizer = started(case, 3, rank, 2)
    with on_warnings() as texts:
        for _ in range(4):
            for p, size in zip(params, ((2.0**41, 1.0), (1.0, 2.0**57))[rank], strict=True):
                p.grad = torch.full_like(p, size)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**16), torch.tensor(0.0)
            optimizer.step()
    assert optimizer.skipped_steps == 4 and len(texts) == (rank == 0)
    assert rank > 0 or "beyond 2^40 on rank 1; the first is that of 1" in texts[0]


@on_ranks(2)
def test_a_rank_that_leaves_out_its_local_steps_says_so(rank):
    options = {"var_update_scaler": 1, "var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 8}
    case = Case("ZeroOneAdam", options=options, bad=tuple((step, 1, float("inf")) for step in range(20, 30)))
    texts, report = said(rank, case, 26)
    assert list(texts) == [23] * rank
    assert rank == 0 or ("left out 3 local steps in a row" in texts[23] and report.skipped > 0)


@on_ranks(2)
def test_attach_after_the_first_steps_counts_from_then_on(rank):
    net = nn.Linear(300, 40)
    ddp = DistributedDataParallel(net, process_group=group())
    optimizer = onebit.OneBitAdam(ddp.parameters(), freeze_step=3, process_group=group())
    with logged() as texts, on_warnings("ignore", UserWarning):
        for step in range(6):
            if step == 2:
                sent = optimizer.report().sent
                onebit.attach(ddp, optimizer)
                assert optimizer.report().sent == sent > 0
            ddp(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
    assert "attach" not in str(texts) and "DistributedDataParallel" not in optimizer.report().verdict
    assert rank > 0 or "Stage 2 begins" in str(texts)


@on_ranks(2)
def test_ddp_without_attach_is_in_the_report_the_log_and_a_warning(rank):
    net = nn.Linear(300, 40)
    ddp = DistributedDataParallel(net, process_group=group())
    optimizer = onebit.OneBitAdam(ddp.parameters(), freeze_step=2, process_group=group())
    with logged() as texts, on_warnings() as caught:
        for _ in range(6):
            ddp(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
    if rank == 0:
        report, ours = optimizer.report(), 4 * (300 * 40 + 40)  # as a ring sends with two ranks
        assert report.sent == optimizer.wire_bytes + (6 + 2) * ours
        assert report.verdict.startswith("DistributedDataParallel averages all gradients uncompressed")
        assert any("Stage 2 begins" in text and "onebit.attach was not called" in text for text in texts)
        for what in ("onebit.attach(model, optimizer)", "OneBitTrainer", "OneBitCallback"):
            assert what in caught[0] and what in report.verdict


def test_where_nobody_has_set_up_logging_it_goes_to_stderr(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    tell("stage %d", 2)
    assert capsys.readouterr().err == "onebit: stage 2\n"
    monkeypatch.setenv("ONEBIT_QUIET", "1")
    tell("stage %d", 2)
    assert not capsys.readouterr().err


def test_a_log_and_a_warning_say_who_speaks_once_whatever_the_form_of_their_lines():
    with logged("%(message)s") as lines:
        tell("stage %d", 2)
        to_log(logging.WARNING, "%s of %d", "50 %", 2)
    assert lines == ["onebit: stage 2", "onebit: 50 % of 2"]
    with logged("%(levelname)s %(filename)s %(funcName)s") as lines:
        tell("stage 2")
        to_log(logging.WARNING, "stage 2")
    here = "test_what_rank_0_says.py test_a_log_and_a_warning_say_who_speaks_once_whatever_the_form_of_their_lines"
    assert lines == [f"INFO {here}", f"WARNING {here}"]
    with on_warnings() as texts:
        warn("no stage 2")
    assert texts == ["onebit: no stage 2"]
    with on_warnings("error", message="no stage"), pytest.raises(UserWarning, match="no stage 2"):
        warn("no stage 2")


def test_waiting_for_the_stream_of_the_thread_is_counted(monkeypatch):
    log = []

    @contextmanager
    def waiting(device):
        log.append("wait")
        yield
        log.append("over")

    monkeypatch.setattr(flight, "waiting", waiting)
    monkeypatch.setattr(flight, "streams", Mock(join=lambda *of: log.append("stream")))
    thread, side = Mock(join=lambda: log.append("thread")), Mock(device=torch.device("cpu"))
    flight.Flight.finish(Mock(states=[side], _thread=thread, _side=side, _error=None))
    assert log == ["wait", "thread", "stream", "over"]


def test_a_captured_step_asks_nothing_of_the_host(monkeypatch):
    """Steps of stage 2 leave out what a CUDA graph can't hold; others are an error."""
    case = Case("OneBitAdam", options={"freeze_step": 2})
    params, optimizer = started(case, 5)
    for module in (stages, pay_off, run_module, skips, front):
        monkeypatch.setattr(module, "capturing", lambda device: True)
    monkeypatch.setattr(stages.AsyncReadback, "finish", lambda self: pytest.fail("the host waits for an event"))
    before = dict(optimizer.pay_off.taken)
    run(case, 0, optimizer, params, 6, 7)
    assert optimizer.pay_off.taken == before and optimizer.steps == 7
    for kind in ("ZeroOneAdam", "OneBitLamb"):
        with pytest.raises(ValueError, match="a CUDA graph can't hold this step"):
            started(case.but(kind=kind), 1)


def test_a_state_with_more_steps_than_freeze_step_says_that_stage_2_begins_at_once():
    case = Case("OneBitAdam", options={"freeze_step": 4})
    for steps, says in ((6, True), (4, False), (2, False)):
        params, optimizer = started(case, 0)
        optimizer.load_state_dict(adamw_state(case, steps))
        with logged() as texts:
            run(case, 0, optimizer, params, steps + 1, steps + 5)
        assert any(f"has {steps} steps, more than freeze_step" in text for text in texts) == says
        assert any("Stage 2 begins" in text for text in texts)


CHANGED = {  # what is done between backward and step, and whether that is a warning
    "torch's clipping": (lambda net, o: nn.utils.clip_grad_norm_(net.parameters(), 1e-3), True),
    "torch's clipping, of norms below": (lambda net, o: nn.utils.clip_grad_norm_(net.parameters(), 1e3), True),
    "ours": (lambda net, o: o.clip_grad_norm_(1e-3), False),
    "nothing": (lambda net, o: None, False),
    "one gradient": (lambda net, o: net[0].weight.grad.mul_(2), False),
}


@pytest.mark.parametrize(
    ("change", "view"),  # views of a bucket count writes together
    [(change, view) for change in CHANGED for view in (True, False) if not (view and change == "one gradient")],
)
@on_ranks(2)
def test_torchs_clipping_in_stage_2_is_one_warning(rank, change, view):
    clip, warns = CHANGED[change]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    ddp = DistributedDataParallel(net, process_group=group(), gradient_as_bucket_view=view)
    optimizer = onebit.OneBitAdam(net.parameters(), freeze_step=3, process_group=group())
    onebit.attach(ddp, optimizer)
    texts = {}
    for step in range(1, 8):
        optimizer.zero_grad()
        ddp(torch.randn(4, 6)).sum().backward()
        clip(net, optimizer)
        with on_warnings() as caught:
            optimizer.step()
        texts |= {step: caught[0]} if caught else {}
    assert list(texts) == ([4] if warns and rank == 0 else [])
    assert not texts or "call optimizer.clip_grad_norm_(max_norm) instead" in texts[4]
