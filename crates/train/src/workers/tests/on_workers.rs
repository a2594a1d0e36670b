//! A step on devices of servers in this process.

use std::time::{Duration, Instant};

use kv_device::remote::Loopback;
use kv_models::kv_cubecl::Remote;

use super::*;
use crate::Worker as Server;

/// A server of one device of the CPU.
struct Served {
    server: Loopback,
    device: Device,
}

impl Served {
    fn new() -> Self {
        let worker = Server::new::<burn::backend::Flex>(vec![Device::flex()]);
        let server = Loopback::start(|listener| worker.serve_async(listener)).unwrap();
        let device = server.device(0, None).unwrap().autodiff();
        Self { server, device }
    }
}

/// The workers of a step on these servers, and the model on the first of them.
fn workers(served: &[Served], deadline: Duration, loader: Batches) -> (Workers, Trainee) {
    let devices: Vec<Device> = served.iter().map(|served| served.device.clone()).collect();
    let on = On::<Autodiff<Remote>>::new(devices[0].clone()).unwrap();
    let (_, trainee) = trainee_on(&on);
    let loader: TrainLoader<Trainee> = Arc::new(loader);
    (Workers::new(&devices, Strategy::Auto, &loader, deadline).unwrap(), trainee)
}

fn batches(served: &[Served], failure: Failure) -> Batches {
    Batches { items: 0..ITEMS, device: served[0].device.clone(), failure }
}

fn gradient_of_head(trainee: &Trainee, mut gradients: GradientsParams) -> Vec<f32> {
    let id = trainee.prepared.model.decoder().head_weight().param().unwrap().id;
    gradients.remove::<2>(id).unwrap().into_data().try_into_vec().unwrap()
}

#[test]
fn gradients_are_those_of_one_device_and_the_bytes_are_as_planned() {
    let (one, _) = step(1, Failure::Never, &|| false);
    let one = one.unwrap().unwrap();
    let served = [Served::new(), Served::new()];
    let (mut workers, trainee) = workers(&served, DEADLINE, batches(&served, Failure::Never));
    let trained = trained_bytes(&trainee);
    for _ in 0..2 {
        let mut positions = vec![];
        let mut record = |loss: &BatchLoss| positions.push(loss.record.position);
        let gradients = workers.step(&trainee, &|| false, &mut record).unwrap().unwrap();
        assert_eq!(positions, [0, 1, 2, 3, 4, 5]);
        let two = gradient_of_head(&trainee, gradients);
        let largest = one.iter().fold(0f32, |most, it| most.max(it.abs()));
        let difference = one.iter().zip(&two).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(difference < 1e-6 * largest, "{difference} of {largest}");
        let [main, other] = workers.moved()[..] else { panic!("two workers") };
        assert_eq!(main, Moved::default());
        assert_eq!(other.weights, trained);
        assert!(other.gradients > 0 && other.gradients <= trained, "{other:?} of {trained}");
    }
}

#[test]
fn a_worker_that_goes_away_ends_the_step() {
    for killed in 0..2 {
        let mut served = [Served::new(), Served::new()];
        let (mut workers, trainee) = workers(&served, DEADLINE, batches(&served, Failure::Never));
        workers.step(&trainee, &|| false, &mut |_| ()).unwrap().unwrap();
        served[killed].server.kill();
        let error = workers.step(&trainee, &|| false, &mut |_| ()).unwrap_err();
        assert!(matches!(error, Error::Worker { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.starts_with("worker remote:127.0.0.1:"), "{message}");
        assert!(message.contains("kv-train resume --devices"), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn a_worker_that_is_late_ends_the_step() {
    let served = [Served::new(), Served::new()];
    let deadline = Duration::from_secs(4);
    let (mut workers, trainee) = workers(&served, deadline, batches(&served, Failure::Slow(4)));
    let started = Instant::now();
    let error = workers.step(&trainee, &|| false, &mut |_| ()).unwrap_err();
    assert!(started.elapsed() < 3 * deadline, "{:?}", started.elapsed());
    assert!(matches!(error, Error::Worker { .. }), "{error:?}");
    assert!(error.to_string().contains("--worker-deadline 4"), "{error}");
}

#[test]
fn errors_and_stops_are_those_of_other_devices() {
    let served = [Served::new(), Served::new()];
    let failing = batches(&served, Failure::Error(5));
    let (mut failed, trainee) = workers(&served, DEADLINE, failing);
    let error = failed.step(&trainee, &|| false, &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains("item 5 fails"), "{error}");
    let (mut stopped, trainee) = workers(&served, DEADLINE, batches(&served, Failure::Never));
    let gradients = stopped.step(&trainee, &|| true, &mut |_| ()).unwrap();
    assert!(gradients.is_none());
}
