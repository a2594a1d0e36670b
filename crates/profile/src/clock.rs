//! The offset between the clocks of device and host.
//!
//! A launch begins on the device after the host has issued it, and ends before the host has its
//! result. So the device's clock is behind the host's by at least `issued - began` and at most
//! `known - ended`. Several launches narrow this range. Two such measurements, before and after a
//! run, give the drift between them.

/// One launch on both clocks, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    /// On the host's: when it was issued.
    pub(crate) issued: u64,
    /// On the device's.
    pub(crate) began: u64,
    /// On the device's.
    pub(crate) ended: u64,
    /// On the host's: when its result was there.
    pub(crate) known: u64,
}

/// Offset of the device's clock from the host's at one time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Offset {
    /// On the device's clock.
    at: f64,
    /// Nanoseconds to be added to the device's.
    nanoseconds: f64,
    /// Error bound of the offset, in nanoseconds.
    error: f64,
}

impl Offset {
    pub(crate) fn of(rounds: &[Round]) -> Option<Self> {
        let difference = |host: u64, device: u64| host as f64 - device as f64;
        let least = rounds.iter().map(|r| difference(r.issued, r.began)).reduce(f64::max)?;
        let most = rounds.iter().map(|r| difference(r.known, r.ended)).reduce(f64::min)?;
        let at = rounds.iter().map(|r| r.began as f64).sum::<f64>() / rounds.len() as f64;
        // They cross where the clocks drift by more than the rounds can tell.
        let error = (most - least).abs() / 2.0;
        Some(Self { at, nanoseconds: (least + most) / 2.0, error })
    }
}

/// The device's clock in terms of the host's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Clock {
    first: Offset,
    /// Nanoseconds of offset per nanosecond.
    drift: f64,
    /// Nanoseconds by which times may be wrong.
    pub(crate) error: f64,
    /// Nanoseconds of drift between the measurements, and by how many that may be wrong; `None`
    /// after one.
    pub(crate) drifted: Option<(f64, f64)>,
}

impl Clock {
    /// Creates the clock of a device that was compared with the host's once or twice.
    pub(crate) fn new(first: Offset, last: Option<Offset>) -> Self {
        match last {
            Some(last) if last.at > first.at => {
                let drifted = last.nanoseconds - first.nanoseconds;
                Self {
                    first,
                    drift: drifted / (last.at - first.at),
                    error: first.error.max(last.error),
                    drifted: Some((drifted, first.error + last.error)),
                }
            }
            _ => Self { first, drift: 0.0, error: first.error, drifted: None },
        }
    }

    /// Converts a time of the device to the host's clock, at least the host's start.
    pub(crate) fn host(&self, device: u64) -> u64 {
        let device = device as f64;
        let offset = self.first.nanoseconds + self.drift * (device - self.first.at);
        (device + offset).max(0.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that was started 5 s before the host's clock and gains 40 ns per ms.
    fn device(host: f64) -> u64 {
        (host * (1.0 + 40e-6) + 5e9) as u64
    }

    fn rounds(from: f64) -> Vec<Round> {
        let round = |i: u64| {
            let (issued, wait, runs, back) =
                (from + i as f64 * 3e5, 2e4 + i as f64 * 1e3, 5e3, 3e4);
            Round {
                issued: issued as u64,
                began: device(issued + wait),
                ended: device(issued + wait + runs),
                known: (issued + wait + runs + back) as u64,
            }
        };
        (0..8).map(round).collect()
    }

    #[test]
    fn times_are_as_right_as_is_said() {
        let (first, last) = (Offset::of(&rounds(1e6)).unwrap(), Offset::of(&rounds(4e9)));
        let clock = Clock::new(first, last);
        assert!(clock.error < 3e4, "{clock:?}");
        for host in [1e6, 7e8, 2e9, 3.9e9] {
            let wrong = clock.host(device(host)) as f64 - host;
            assert!(wrong.abs() <= clock.error, "{wrong} at {host} by {clock:?}");
        }
        let (drifted, error) = clock.drifted.unwrap();
        assert!((drifted + 40e-6 * 4e9).abs() <= error, "{clock:?}");
        // Without the second measurement the drift would be an error.
        let once = Clock::new(first, None);
        assert!((once.host(device(3.9e9)) as f64 - 3.9e9).abs() > once.error);
    }

    #[test]
    fn no_rounds_are_no_offset() {
        assert_eq!(Offset::of(&[]), None);
    }
}
