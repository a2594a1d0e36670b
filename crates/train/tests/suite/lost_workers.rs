//! Workers that are killed, stopped or refused, as processes of their own.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use burn::server::RemoteServer;
use kv_device::remote::{Loopback, serve_version};
use kv_models::kv_cubecl::{Autodiff, Flex};
use kv_train::{Checkpoints, checkpointed};

use crate::{
    common::{Losses, World, fails, losses, program, qat_args, saved, succeeds, weights},
    resume::limited,
};

type Cpu = World<Autodiff<Flex>>;

/// The longest time that a run may take after a fault.
const LONGEST: Duration = Duration::from_secs(60);

/// A process of `kv-train worker`.
struct Worker {
    child: Child,
    address: String,
}

impl Worker {
    fn start() -> Self {
        let mut command = program(&["worker", "--listen", "127.0.0.1:0", "--threads", "1"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let (_, address) = line.split_once(" on ").unwrap_or_else(|| panic!("{line}"));
        let address = address.split(';').next().unwrap().to_string();
        // A full pipe would block the worker.
        thread::spawn(move || output.read_to_end(&mut Vec::new()));
        Self { child, address }
    }

    /// Stops the process without ending it.
    fn stop(&self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-STOP", &pid]).status().unwrap().success());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn list(workers: &[Worker]) -> String {
    let devices: Vec<String> = workers.iter().map(|it| format!("{}/0", it.address)).collect();
    format!("remote:{}", devices.join(","))
}

/// A command whose output goes to pipes.
fn spawn(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for a program. One that ends with an error must print one line that contains one of
/// `names`.
fn ended(mut child: Child, names: &[&str]) -> Option<String> {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > LONGEST {
            child.kill().unwrap();
            panic!("the run hangs: {:?}", child.wait_with_output());
        }
        thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    if output.status.success() {
        return None;
    }
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: ") && error.lines().count() == 1, "{error:?}");
    assert!(names.iter().any(|name| error.contains(name)), "{names:?}: {error}");
    Some(error)
}

/// Draws a number below `n` from a linear congruential generator.
fn pick(state: &mut u64, n: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % n
}

/// A worker is killed at a random time of a run, 6 times, or with `KV_ALL_CASES=1` 50 times.
#[test]
fn killed_workers_end_runs_that_can_resume() {
    let all = std::env::var_os("KV_ALL_CASES").is_some_and(|all| all == "1");
    let cases = if all { 50 } else { 6 };
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let args = |out: &str, devices: usize, list: &str| {
        let mut args = qat_args(&model, &text, out, "12");
        if devices == 2 {
            let at = args.iter().position(|&arg| arg == "--accumulation").unwrap();
            args[at + 1] = "1";
        }
        args.extend(["--devices", list]);
        program(&args)
    };
    let whole: Vec<(String, Duration)> = [1, 2]
        .map(|devices| {
            let workers: Vec<Worker> = (0..devices).map(|_| Worker::start()).collect();
            let (out, started) = (world.string(&format!("whole-{devices}")), Instant::now());
            succeeds(&mut args(&out, devices, &list(&workers)));
            (out, started.elapsed())
        })
        .into();
    let (mut state, mut resumed) = (11, 0);
    for case in 0..cases {
        let devices = 1 + case % 2;
        let (expected, time) = &whole[devices - 1];
        let mut workers: Vec<Worker> = (0..devices).map(|_| Worker::start()).collect();
        let out = world.string(&format!("killed-{case}"));
        let run = spawn(args(&out, devices, &list(&workers)));
        thread::sleep(Duration::from_millis(pick(&mut state, time.as_millis() as u64)));
        let killed = workers.remove(pick(&mut state, devices as u64) as usize);
        let address = killed.address.clone();
        drop(killed);
        let error = ended(run, &[&address]);
        let checkpoints = Checkpoints::of(out.as_ref());
        if error.is_none() || checkpoints.steps().is_ok_and(|steps| steps.is_empty()) {
            continue;
        }
        resumed += 1;
        if devices == 1 {
            workers.push(Worker::start());
        }
        succeeds(&mut program(&["resume", &out, "--devices", &list(&workers)]));
        let both = [losses(&out), losses(expected)];
        match devices {
            1 => {
                assert!(saved(&out) == saved(expected), "case {case}");
                assert_eq!(both[0], both[1], "case {case}");
            }
            _ => same_within(&world, [&out, expected], &both),
        }
    }
    assert!(resumed > 0, "no run was resumed");
}

/// Compares losses and trained weights of two runs.
fn same_within(world: &Cpu, folders: [&str; 2], losses: &[Losses; 2]) {
    let [a, b] = losses.each_ref().map(Losses::objectives);
    assert_eq!(a.len(), b.len());
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5), "{a:?} and {b:?}");
    let [a, b] = folders.map(|folder| {
        let base = world.path("base");
        let model = kv_models::load(base, &world.device).unwrap().model;
        let prepared = checkpointed(&world.device, model, folder.as_ref(), 12).unwrap();
        weights(&prepared.convert().model)
    });
    for (name, a) in &a {
        let same = a.iter().zip(&b[name]).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(same, "{folders:?}: {name}");
    }
}

/// A worker that is stopped keeps its connections open and answers nothing.
#[test]
fn a_worker_that_does_not_answer_ends_the_run() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let folder = world.folder.path();
    let stopped = |number: usize, after: Option<&str>| {
        let workers = [Worker::start(), Worker::start()];
        let out = folder.join(format!("{number}-{}", after.is_some()));
        let (list, out) = (list(&workers), out.to_str().unwrap());
        if after.is_none() {
            workers[number].stop();
        }
        let mut args = qat_args(&model, &text, out, "4000");
        args.extend(["--devices", &list, "--worker-deadline", "3"]);
        let mut run = spawn(program(&args));
        if let Some(after) = after {
            let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
            assert!(lines.by_ref().any(|line| line.unwrap().contains(after)));
            workers[number].stop();
            thread::spawn(move || lines.count());
        }
        let error = ended(run, &[&workers[number].address]).expect("the run ends");
        assert!(error.contains("answer") || error.contains("timed out"), "{error}");
    };
    thread::scope(|scope| {
        for (number, after) in [(0, Some("10/4000")), (1, Some("10/4000")), (1, None)] {
            let stopped = &stopped;
            scope.spawn(move || stopped(number, after));
        }
    });
}

#[test]
fn a_worker_of_another_version_is_refused() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let server = RemoteServer::new([burn::tensor::Device::flex()]);
    let other = Loopback::serve(&serve_version::<burn::backend::Flex>(server.clone(), "0.0.1"));
    let (other, plain) = (other.unwrap(), Loopback::serve(&server).unwrap());
    for (server, parts) in [
        (&other, ["has version 0.0.1", "build both from the same version"]),
        (&plain, ["is no worker", "start kv-train worker"]),
    ] {
        let (list, out) = (format!("remote:{}/0", server.address()), world.string("refused"));
        let mut args = qat_args(&model, &text, &out, "4");
        args.extend(["--devices", &list]);
        fails(&mut program(&args), &parts);
        assert!(!world.path("refused").exists());
    }
}

/// Files are limited to half a MB, as on a full disk.
#[test]
fn a_full_disk_of_the_client_is_its_error() {
    let world = Cpu::new();
    let (model, text) = (world.save_model("base"), world.string("text.txt"));
    let workers = [Worker::start(), Worker::start()];
    let (list, out) = (list(&workers), world.string("full"));
    let mut args = qat_args(&model, &text, &out, "8");
    args.extend(["--devices", &list]);
    fails(&mut limited(1000, &args), &["checkpoints", "File too large"]);
    succeeds(&mut program(&args));
}
