//! Watches what CubeCL launches.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::Instant,
};

use burn::{
    backend::DispatchDevice,
    tensor::{Device, Tensor},
};
use cubecl::{
    future::block_on,
    logging::{
        Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest,
    },
};
use kv_models::spans::{PHASE, REPLAY};
use tracing::trace_span;

use crate::{
    Error, Result,
    clock::{Clock, Offset, Round},
    launch::{Launch, Launches, Queue, Timing},
    log::Issued,
    recorder::{Shared, lock},
};

/// The phase of launches that compare clocks.
const CALIBRATION: &str = "calibration";
/// Launches per comparison of clocks.
const ROUNDS: usize = 24;

/// The times at which the host had each result of a comparison of clocks.
pub(crate) type Known = Vec<u64>;

/// The launches to observe, and those observed.
#[derive(Debug)]
pub(crate) struct Watch {
    shared: Arc<Shared>,
    running: Option<Running>,
    /// Results of all clock comparisons.
    pub(crate) calibrations: Vec<Known>,
}

#[derive(Debug)]
struct Running {
    observation: LaunchObservation,
    reader: JoinHandle<Vec<Measured>>,
}

/// A launch whose measurement has not been read.
struct Unread {
    issued: Issued,
    thread: usize,
    kernel: &'static str,
    profile: ProfileDuration,
}

/// A launch, in nanoseconds of the clock that measured it.
struct Measured {
    issued: Issued,
    thread: usize,
    kernel: &'static str,
    method: TimingMethod,
    /// `None` where the device did not say.
    ran: Option<(u64, u64)>,
}

/// The channel to the thread that reads measurements, because reading waits for the launch.
#[derive(Debug, Default)]
pub(crate) struct ToReader {
    unread: Mutex<Option<Sender<Unread>>>,
    /// The device whose replays are measured.
    device: Mutex<Option<cubecl::Device>>,
}

impl ToReader {
    /// Sets the device of replays.
    pub(crate) fn watch(&self, device: &Device) {
        if let DispatchDevice::Cube(device) = device.as_dispatch() {
            *lock(&self.device) = Some(device.clone());
        }
    }

    fn send(&self, unread: Unread) {
        if let Some(sender) = &*lock(&self.unread) {
            // The reader ends when nothing can be sent any more.
            let _ = sender.send(unread);
        }
    }

    /// Stops observing launches, so a replay is measured as a whole.
    pub(crate) fn begin_replay(&self, shared: &Shared) {
        let Some(device) = lock(&self.device).clone() else { return };
        let at = shared.now();
        // A device that cannot measure it replays all the same.
        if let Ok(window) = device.client().profile_start() {
            shared.log(|log| log.replay = Some((window, log.issue(at))));
        }
    }

    pub(crate) fn end_replay(&self, shared: &Shared) {
        let taken = shared.log(|log| Some((log.replay.take()?, log.number)));
        let (Some(device), Some(((window, mut issued), thread))) =
            (lock(&self.device).clone(), taken)
        else {
            return;
        };
        let measured = device.client().profile_end(window);
        issued.host = shared.now().saturating_sub(issued.at);
        match measured {
            Ok(profile) => self.send(Unread { issued, thread, kernel: REPLAY, profile }),
            Err(_) => shared.log(|log| log.unmeasured += 1),
        }
    }
}

#[derive(Debug)]
struct Observer(Arc<Shared>);

impl LaunchObserver for Observer {
    fn launched(&self, _: &'static str) {
        let at = self.0.now();
        self.0.log(|log| {
            let issued = log.issue(at);
            if log.issued.replace(issued).is_some() {
                log.unmeasured += 1;
            }
        });
    }

    fn timing(&self) -> TimingRequest {
        TimingRequest::Deferred
    }

    fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
        let now = self.0.now();
        let taken = self.0.log(|log| Some((log.issued.take()?, log.number)));
        let Some((mut issued, thread)) = taken else { return };
        issued.host = now.saturating_sub(issued.at);
        self.0.queue.send(Unread { issued, thread, kernel, profile });
    }

    fn timed(&self, _: &'static str, _: Duration, _: TimingMethod) {
        // CubeCL's logger has read the measurement, which has a duration but no start.
        self.0.log(|log| log.unmeasured += u64::from(log.issued.take().is_some()));
    }
}

impl Watch {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, running: None, calibrations: vec![] }
    }

    pub(crate) fn start(&mut self) {
        let (sender, receiver) = channel();
        let start = self.shared.start;
        let reader = std::thread::spawn(move || read(&receiver, start));
        *lock(&self.shared.queue.unread) = Some(sender);
        let observation = LaunchObservation::new(Arc::new(Observer(self.shared.clone())));
        self.running = Some(Running { observation, reader });
    }

    /// Stops listening, and waits for the last measurements.
    pub(crate) fn finish(&mut self) -> Launches {
        let Some(Running { observation, reader }) = self.running.take() else {
            return Launches::default();
        };
        drop(observation);
        lock(&self.shared.queue.unread).take();
        let measured = reader.join().unwrap_or_default();
        let threads = lock(&self.shared.threads).clone();
        let unmeasured: u64 = threads
            .iter()
            .map(|log| lock(log))
            .map(|log| log.unmeasured + u64::from(log.issued.is_some()))
            .sum();
        let calibration = lock(&self.shared.labels).group(CALIBRATION);
        let mut by_thread: BTreeMap<usize, Vec<Measured>> = BTreeMap::new();
        for launch in measured {
            by_thread.entry(launch.thread).or_default().push(launch);
        }
        let silent = by_thread.values().flatten().filter(|launch| launch.ran.is_none()).count();
        let queues = by_thread
            .into_iter()
            .map(|(thread, launches)| self.queue(thread, &launches, calibration))
            .collect();
        Launches { queues, unmeasured: unmeasured + silent as u64 }
    }

    fn queue(&self, thread: usize, launches: &[Measured], calibration: u32) -> Queue {
        let (comparing, launches): (Vec<&Measured>, Vec<&Measured>) =
            launches.iter().partition(|launch| launch.issued.place.0 == calibration);
        let by_device = |launch: &&Measured| launch.method == TimingMethod::Device;
        let timing = match launches.iter().any(by_device) {
            false => Timing::Host,
            true => {
                let offsets =
                    self.calibrations.iter().filter_map(|known| offset(&comparing, known));
                let offsets: Vec<Offset> = offsets.collect();
                match (offsets.first(), offsets.get(1..)) {
                    (Some(&first), last) => Timing::Device(Clock::new(
                        first,
                        last.and_then(|last| last.last().copied()),
                    )),
                    _ => Timing::Uncompared,
                }
            }
        };
        // Where clocks were not compared, none may run before it is issued.
        let behind = launches
            .iter()
            .filter_map(|launch| Some(launch.issued.at as i64 - launch.ran?.0 as i64))
            .max()
            .unwrap_or(0);
        let mut launches: Vec<Launch> = launches
            .into_iter()
            .filter_map(|launch| {
                let &Measured { issued, kernel, ran, .. } = launch;
                let [start, end] = <[u64; 2]>::from(ran?).map(|time| match timing {
                    Timing::Host => time,
                    Timing::Device(clock) => clock.host(time),
                    Timing::Uncompared => time.saturating_add_signed(behind),
                });
                let Issued { label, place, in_step, at, host } = issued;
                Some(Launch { label, place, in_step, kernel, issued: at, host, start, end })
            })
            .collect();
        launches.sort_by_key(|launch| (launch.start, launch.end));
        Queue { thread, timing, launches }
    }
}

fn read(unread: &Receiver<Unread>, start: Instant) -> Vec<Measured> {
    let read = |Unread { issued, thread, kernel, profile }| {
        let method = profile.timing_method();
        let ran = block_on(profile.resolve()).map(|ticks| {
            let since = |duration: Duration| duration.as_nanos() as u64;
            let (began, ended) =
                (ticks.start_duration_since(start), ticks.end_duration_since(start));
            (since(began), since(ended))
        });
        Measured { issued, thread, kernel, method, ran }
    };
    unread.iter().map(read).collect()
}

/// Makes launches, each after the result of the previous one arrived.
pub(crate) fn calibrate(shared: &Shared, device: &Device) -> Result<Known> {
    let _phase = trace_span!(target: PHASE, CALIBRATION).entered();
    let one = Tensor::<1>::ones([1], device);
    let round = |_| {
        let sum = one.clone() + 1.0;
        sum.try_into_data().map_err(|why| Error::Device { why: format!("{why:?}") })?;
        Ok(shared.now())
    };
    (0..ROUNDS).map(round).collect()
}

/// Computes the offset from the launches of one comparison, each the last one issued before
/// its result was known.
fn offset(launches: &[&Measured], known: &Known) -> Option<Offset> {
    let mut rounds = vec![];
    // The first round warms up; its start is not known.
    let mut before = 0;
    for &known in known {
        let within = |launch: &&&Measured| (before..known).contains(&launch.issued.at);
        let last = launches.iter().filter(within).max_by_key(|launch| launch.issued.at);
        if let Some(Measured { issued, ran: Some((began, ended)), .. }) = last
            && before > 0
        {
            rounds.push(Round { issued: issued.at, began: *began, ended: *ended, known });
        }
        before = known;
    }
    Offset::of(&rounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(at: u64, ran: Option<(u64, u64)>, method: TimingMethod, phase: u32) -> Measured {
        let issued = Issued { label: None, place: (phase, 0), in_step: false, at, host: 10 };
        Measured { issued, thread: 0, kernel: "kernel", method, ran }
    }

    fn watch(calibrations: Vec<Known>) -> Watch {
        Watch { calibrations, ..Watch::new(crate::Recorder::new().shared()) }
    }

    /// Rounds from `start` on, each 1000 ns; the device's clock is 5000 ns ahead.
    fn rounds(start: u64) -> (Vec<Measured>, Known) {
        let at = |i: u64| start + 1000 * i;
        let launch = |i| {
            let ran = Some((at(i) + 300 + 5000, at(i) + 600 + 5000));
            measured(at(i), ran, TimingMethod::Device, 1)
        };
        ((1..9).map(launch).collect(), (1..9).map(|i| at(i) + 900).collect())
    }

    #[test]
    fn times_of_the_device_become_those_of_the_host() {
        let ((mut launches, first), (last, known)) = (rounds(0), rounds(90_000));
        launches.extend(last);
        launches.push(measured(50_000, Some((56_000, 57_000)), TimingMethod::Device, 2));
        launches.push(measured(51_000, None, TimingMethod::Device, 2));
        let queue = watch(vec![first, known]).queue(0, &launches, 1);
        let Timing::Device(clock) = queue.timing else { panic!("{:?}", queue.timing) };
        // What was launched to compare the clocks is no launch of the run.
        let [launch] = queue.launches[..] else { panic!("{queue:?}") };
        assert_eq!(clock.error, 300.0);
        assert!(launch.start.abs_diff(51_000) <= 300, "{launch:?}");
        assert_eq!(launch.end - launch.start, 1000);
    }

    #[test]
    fn a_clock_that_was_not_compared_keeps_the_order() {
        let launches = [
            measured(10_000, Some((1_500, 1_700)), TimingMethod::Device, 2),
            measured(11_000, Some((2_000, 2_100)), TimingMethod::Device, 2),
        ];
        let queue = watch(vec![]).queue(0, &launches, 1);
        assert_eq!(queue.timing, Timing::Uncompared);
        let starts: Vec<u64> = queue.launches.iter().map(|launch| launch.start).collect();
        assert_eq!(starts, [10_500, 11_000]);
    }

    #[test]
    fn without_timestamps_times_are_the_hosts() {
        let launches = [measured(10_000, Some((10_100, 10_900)), TimingMethod::System, 2)];
        let queue = watch(vec![rounds(0).1]).queue(0, &launches, 1);
        assert_eq!(queue.timing, Timing::Host);
        assert_eq!((queue.launches[0].start, queue.launches[0].end), (10_100, 10_900));
    }
}
