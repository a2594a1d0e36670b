//! Devices of workers, which are servers in this process.

use std::{thread, time::Duration};

use burn::{
    server::{RemoteServer, TokenAuthorizer},
    tensor::Device,
};
use kv_device::remote::Loopback;
use serde_json::Value;

use crate::common::{AUSTEN, Outcome, assert_one_line, kv_eval_in};

const TOKEN: (&str, &str) = ("KV_WORKER_TOKEN", "a long token");

fn serve() -> Loopback {
    let server = RemoteServer::new([Device::flex(), Device::flex()])
        .with_authorizer(TokenAuthorizer::new(TOKEN.1).unwrap());
    Loopback::serve(&kv_models::remote::serve_ops::<burn::backend::Flex>(server)).unwrap()
}

fn ppl(devices: &str, tokens: &str, more: &[&str]) -> Outcome {
    let text = format!("{AUSTEN}/heldout.txt");
    let args = ["ppl", "--model", AUSTEN, "--text", &text, "--tokens", tokens, "--window", "200"];
    let cache = ["--cache", "k2v2-g32-r32", "--devices", devices];
    kv_eval_in(&[&args[..], &cache, more].concat(), &[TOKEN])
}

#[test]
fn workers_give_the_numbers_of_this_machine() {
    let (server, folder) = (serve(), tempfile::tempdir().unwrap());
    let numbers = |devices: &str| {
        let json = folder.path().join(devices.replace(['/', ':'], "-"));
        let outcome = ppl(devices, "600", &["--json", json.to_str().unwrap()]);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        let report: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        let runs = report["runs"].as_array().unwrap();
        runs.iter().map(|run| run["nll"].as_f64().unwrap()).collect::<Vec<f64>>()
    };
    let [one, two] = ["1", "0-1"].map(|it| numbers(&format!("remote:{}/{it}", server.address())));
    assert_eq!(one, two);
    // Some products are fused on this machine, and not on a remote device.
    for (here, there) in numbers("flex").iter().zip(&one) {
        assert!((here - there).abs() < 1e-5, "{here} and {there}");
    }
}

#[test]
fn a_lost_worker_is_one_error() {
    for (i, after) in [0, 300, 700, 1500].into_iter().enumerate() {
        let mut server = serve();
        let list = format!("remote:{}/0{}", server.address(), if i % 2 == 0 { "-1" } else { "" });
        let address = server.address().to_string();
        let kill = thread::spawn(move || {
            thread::sleep(Duration::from_millis(after));
            server.kill();
        });
        let outcome = ppl(&list, "20000", &[]);
        kill.join().unwrap();
        assert_eq!(outcome.code, 1, "after {after} ms: {}", outcome.stderr);
        assert_one_line(&outcome, &[&address]);
    }
}
