//! Launches of a device, on the host's clock.

use crate::{clock::Clock, log::PhaseGroup};

/// A launch and when it ran, in nanoseconds of the host's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    /// The operation that issued it.
    pub(crate) label: Option<u32>,
    pub(crate) place: PhaseGroup,
    /// True for a part of a captured step that is launched.
    pub(crate) in_step: bool,
    pub(crate) kernel: &'static str,
    pub(crate) issued: u64,
    /// Time the host took to issue and time it.
    pub(crate) host: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// The source of a queue's times.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(feature = "cube"), expect(dead_code, reason = "without a device there is no queue"))]
pub(crate) enum Timing {
    /// By the device's clock.
    Device(Clock),
    /// By the device's clock, which was never compared with the host's: no launch begins before it
    /// is issued.
    Uncompared,
    /// By the host, around launches that it waits for.
    Host,
}

/// The launches that one thread issued, a queue of CubeCL.
#[derive(Clone, Debug)]
pub(crate) struct Queue {
    /// The index of the thread's log.
    pub(crate) thread: usize,
    pub(crate) timing: Timing,
    /// By their start.
    pub(crate) launches: Vec<Launch>,
}

/// The launches of a device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Launches {
    pub(crate) queues: Vec<Queue>,
    /// Launches without a measurement.
    pub(crate) unmeasured: u64,
}

/// Time in which a queue had nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// The launch that ended it, by its place in the queue.
    pub(crate) next: usize,
}

impl Queue {
    /// The gaps between launches.
    pub(crate) fn gaps(&self) -> Vec<Gap> {
        let mut busy_until = self.launches.first().map_or(0, |launch| launch.end);
        let mut gaps = vec![];
        for (next, launch) in self.launches.iter().enumerate().skip(1) {
            if launch.start > busy_until {
                gaps.push(Gap { start: busy_until, end: launch.start, next });
            }
            busy_until = busy_until.max(launch.end);
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_where_no_launch_runs() {
        let launch = |start, end| Launch {
            label: None,
            place: (0, 0),
            in_step: false,
            kernel: "k",
            issued: 0,
            host: 0,
            start,
            end,
        };
        let launches = vec![launch(10, 20), launch(15, 30), launch(16, 18), launch(50, 60)];
        let queue = Queue { thread: 0, timing: Timing::Host, launches };
        assert_eq!(queue.gaps(), [Gap { start: 30, end: 50, next: 3 }]);
    }
}
