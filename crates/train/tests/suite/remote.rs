//! Workers of other machines, which are servers in this process.

use std::net::TcpListener;

use burn::tensor::Device;
use kv_device::remote::Loopback;
use kv_models::kv_cubecl::{Autodiff, Flex, On, Remote};
use kv_train::{History, Resume, Run, Texts, TrainConfig, Worker, train};

use crate::{
    common::{World, fails, program, qat_args, succeeds},
    devices::{by_step, difference, kinds, run},
};

type Cpu = World<Autodiff<Flex>>;

/// Returns a server of devices of the CPU.
fn serve(devices: usize, token: Option<&str>) -> Loopback {
    let mut worker = Worker::new::<burn::backend::Flex>(vec![Device::flex(); devices]);
    if let Some(token) = token {
        worker = worker.with_token(token).unwrap();
    }
    Loopback::start(|listener| worker.serve_async(listener)).unwrap()
}

fn first_device(server: &Loopback) -> Device {
    server.device(0, None).unwrap().autodiff()
}

#[test]
fn two_workers_are_one_device_with_twice_the_batch() {
    let cpu = Cpu::new();
    let served = [serve(1, None), serve(1, None)];
    let devices = served.each_ref().map(first_device);
    let far = cpu.on(On::<Autodiff<Remote>>::new(devices[0].clone()).unwrap());
    let texts = Texts { train: far.tokens("text.txt"), valid: None };
    for ((kind, model, config), (_, far_model, _)) in kinds(&cpu).into_iter().zip(kinds(&far)) {
        let one = TrainConfig { batch: 2, ..config.clone() };
        // A teacher has no gradients, so this machine fuses some of its operations, and a worker
        // does not. Over the steps, their roundings would grow beyond the tolerance.
        let one = match kind {
            "distilled" => {
                let alone = Run::new(far.path("alone"));
                train(&far.device, far_model.clone(), &texts, &one, alone).unwrap()
            }
            _ => run(&cpu, &model, kind, &one, 1, Resume::No).unwrap(),
        };
        let two = TrainConfig { batch: 1, devices: 2, ..config };
        let on_both = Run { devices: Some(&devices), ..Run::new(far.path(kind)) };
        let two = train(&far.device, far_model, &texts, &two, on_both).unwrap();
        for (step, (one, two)) in by_step(&one, 20).into_iter().zip(by_step(&two, 20)).enumerate() {
            assert!((one - two).abs() < 1e-6, "{kind}, step {step}: {one} and {two}");
        }
        let difference = difference(one, two);
        assert!(difference < 1e-5, "{kind}: {difference}");
    }
}

#[test]
fn the_program_trains_on_workers() {
    const TOKEN: &str = "a long token";
    let cpu = Cpu::new();
    let (model, text) = (cpu.save_model("base"), cpu.string("text.txt"));
    let served = serve(2, Some(TOKEN));
    let [here, there, refused] = ["here", "there", "refused"].map(|name| cpu.string(name));
    let on = |list: &str, out: &str, token: Option<&str>| {
        let mut args: Vec<&str> = qat_args(&model, &text, out, "8");
        let at = args.iter().position(|&arg| arg == "--accumulation").unwrap();
        args[at + 1] = "1";
        args.extend(["--devices", list]);
        let mut program = program(&args);
        match token {
            Some(token) => program.env("KV_WORKER_TOKEN", token),
            None => program.env_remove("KV_WORKER_TOKEN"),
        };
        program
    };
    let address = served.address();
    succeeds(&mut on("flex:2", &here, None));
    succeeds(&mut on(&format!("remote:{address}/0-1"), &there, Some(TOKEN)));
    let [one, other] = [&here, &there].map(|run| History::read(run.as_ref()).unwrap());
    assert_eq!(one.train.len(), other.train.len());
    for (one, other) in one.train.iter().zip(&other.train) {
        // The program splits some sums over its threads, and a worker does not.
        assert!((one.loss - other.loss).abs() < 1e-5, "{one:?} and {other:?}");
    }
    assert!(cpu.path("there/model/model.safetensors").is_file());
    let spec = std::fs::read_to_string(cpu.path("there/run.json")).unwrap();
    assert!(spec.contains(&format!("remote:{address}/0,{address}/1")), "{spec}");
    assert!(!spec.contains(TOKEN), "{spec}");

    let refuses = |list: &str, token: Option<&str>, parts: &[&str]| {
        fails(&mut on(list, &refused, token), parts);
        assert!(!cpu.path("refused").exists(), "a refused run has left files");
    };
    let one = format!("remote:{address}/0");
    refuses(&one, None, &["asks for a token", "KV_WORKER_TOKEN"]);
    refuses(&one, Some("other"), &["asks for another token"]);
    refuses(&format!("remote:{address}/5"), Some(TOKEN), &["has devices 0 to 1"]);
    refuses("remote:127.0.0.1:9/0", Some(TOKEN), &["127.0.0.1:9 cannot be reached", "worker"]);
    refuses("remote:nowhere", Some(TOKEN), &["--devices", "HOST:PORT"]);
}

#[test]
fn a_worker_needs_a_token_for_other_machines_and_a_free_port() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let worker = |listen: &str| {
        let mut program = program(&["worker", "--listen", listen]);
        program.env_remove("KV_WORKER_TOKEN");
        program
    };
    fails(&mut worker(&address), &["listen", "cannot bind"]);
    fails(&mut worker("0.0.0.0:0"), &["needs a token", "KV_WORKER_TOKEN"]);
    fails(&mut worker("nothing"), &["listen \"nothing\"", "HOST:PORT"]);
}
