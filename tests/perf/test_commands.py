"""The commands of perf: a bad command line, or what can't be measured here, is one clear error before any work."""

import pytest

from perf import bench
from perf.all_reduce import benchmark as all_reduce
from perf.cluster import comparison
from perf.convergence import study
from perf.kernels import benchmark as kernels
from perf.lab import demo, network
from perf.lab.namespaces import LabUnavailable
from perf.methods import command as methods
from perf.train_step import benchmark as train_step
from perf.train_step import volume


@pytest.mark.parametrize(
    ("main", "arguments", "says"),
    [
        (all_reduce.main, "--lab --hosts=1", "not a number of hosts: give 2 to 64"),
        (all_reduce.main, "--lab --hosts=two", "not a number of hosts"),
        (all_reduce.main, "--lab --rates=1gbyte", "no rate from 1mbit to 100gbit"),
        (all_reduce.main, "--elements=2**20,many", "'many' is not a positive number"),
        (all_reduce.main, "--chunks=0", "'0' is not a positive number"),
        (all_reduce.main, "--hosts=2", "--hosts: only with --lab"),
        (all_reduce.main, "--lab --device=cpu --backend=gloo", "--device and --backend: only without --lab"),
        (all_reduce.main, "--each=2", "--each: only with --lab"),
        (all_reduce.main, "--lab --each=2 --direct", "--direct: only with one rank a host"),
        (all_reduce.main, "--lab --each=0", "'0' is not a positive number"),
        (all_reduce.main, "--lab --each=65", "1 to 64 ranks"),
        (all_reduce.main, "--lab --rtt=1s", 'no round trip from 1ms to 100ms: write "50ms"'),
        (all_reduce.main, "--lab --rates=1gbit,2gbit,3gbit --rtt=1ms,2ms", "--rtt has 2 round trips for 3 rates: give"),
        (all_reduce.main, "--rtt=1ms", "--rtt: only with --lab"),
        (all_reduce.main, "--device=cpu", "start it with torchrun, or give it --lab"),
        (train_step.main, "--lab --hosts=1", "not a number of hosts: give 2 to 64"),
        (train_step.main, "--lab --share=1", "'1' is no share: give a number below 1"),
        (train_step.main, "--lab --share=most", "is no share"),
        (train_step.main, "--lab --rtt=1ms --share=0.9", "--share: links that it chooses have no round trip"),
        (train_step.main, "--variants=fp8", "'fp8' is no variant: choose among fp32, fp16"),
        (train_step.main, "--steps=0", "'0' is not a positive number"),
        (train_step.main, "--rates=1gbit --share=0.9", "--rates and --share: only with --lab"),
        (train_step.main, "--lab --backend=gloo", "--backend: only without --lab"),
        (train_step.main, "--rtt=1ms", "--rtt: only with --lab"),
        (train_step.main, "--lab --train --clip=-1", "--clip"),
        (train_step.main, "--lab --train --clip=nan", "--clip"),
        (train_step.main, "--lab --train --clip=inf", "--clip"),
        (train_step.main, "--device=cpu", "start it with torchrun, or give it --lab"),
        (volume.main, "--share=0", "lies between 0 and 1"),
        (volume.main, "--share=1", "lies between 0 and 1"),
        (demo.main, "", "--rate"),
        (demo.main, "--rate=fast", "'fast' is no rate from 1mbit to 100gbit"),
        (demo.main, "--rate=unshaped", "is no rate"),
        (demo.main, "--rate=1gbit --hosts=1", "not a number of hosts"),
        (demo.main, "--rate=1gbit --codec", "--codec needs no network"),
        (kernels.main, "--device=toaster", "toaster"),
        (kernels.main, "--device=cpu --block-size=33 --elements=4096", "block_size"),
        (comparison.main, "--rates=1gbyte", "no rate from"),
        (comparison.main, "--rates=unshaped", "no rate from"),
        (comparison.main, "--hosts=1", "number of hosts"),
        (comparison.main, "--nodes --shapes=1x4", "hosts x ranks of each"),
        (comparison.main, "--nodes --shapes=2xa", "hosts x ranks of each"),
        (methods.main, "--models=huge", "huge"),
        (methods.main, "--links=1mbit", "1mbit"),
        (methods.main, "--methods=magic", "magic"),
        (methods.main, "--only=plots", "plots"),
        (methods.main, "--report --out=.", "measure first"),
        (study.main, "--tasks=poems", "'poems' is no task: choose among"),
        (study.main, "--report --out=.", "there are no runs in '.': leave --report out"),
        (bench.main, "--only=kernel", "choose among kernels, optimizer, network"),
    ],
)
def test_what_cannot_be_done_is_one_error(main, arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    try:
        status = main(arguments.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and says in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("of", [all_reduce, train_step])
def test_folders_labs_and_links_of_benchmarks_of_the_network(of, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(of, "run_lab", lambda *_: pytest.fail("it measured"))
        assert of.main(["--lab", f"--out={tmp_path / 'file'}"]) == 2
    assert "is no folder to write to" in capsys.readouterr().err

    def unavailable():
        raise LabUnavailable("the network lab needs Linux, not darwin: run it there, as root")

    monkeypatch.setattr(network, "check_available", unavailable)
    assert of.main(["--lab", f"--out={tmp_path}"]) == 2
    assert "error: the network lab needs Linux" in capsys.readouterr().err
    shared = ["--lab", "--rates=100mbit,1gbit,unshaped"]
    assert of.parse_arguments(shared).rates == ["100mbit", "1gbit", "unshaped"]
    assert of.parse_arguments([*shared, "--rtt=50ms"]).rates == ["100mbit+50ms", "1gbit+50ms", "unshaped+50ms"]
    links = of.parse_arguments([*shared, "--rtt=50ms,none,2.5ms"]).rates
    assert links == ["100mbit+50ms", "1gbit", "unshaped+2.5ms"]
    assert train_step.parse_arguments(["--lab", "--rtt=1ms"]).share == 0
