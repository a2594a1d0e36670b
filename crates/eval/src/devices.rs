//! Devices that share out the parts of an evaluation.

use core::fmt;
use std::{
    collections::BTreeMap,
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, channel},
    },
    thread,
};

use burn::{module::Module, tensor::Device};
use kv_cubecl::{On, Target};
use kv_models::LanguageModel;
use rayon::ThreadPool;

use crate::{Error, Result};

/// The devices of an evaluation. Several devices share out its eval windows or items. The results
/// are the same as on one device, bit for bit if all compute alike.
///
/// A device can be listed more than once. On the CPU, devices share out the threads.
#[derive(Clone, Copy)]
pub struct Devices<'a, T: Target>(&'a [On<T>]);

impl<T: Target> fmt::Debug for Devices<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Devices").field(&self.0).finish()
    }
}

impl<'a, T: Target> From<&'a On<T>> for Devices<'a, T> {
    fn from(device: &'a On<T>) -> Self {
        Self(core::slice::from_ref(device))
    }
}

impl<'a, T: Target> From<&'a [On<T>]> for Devices<'a, T> {
    /// # Panics
    /// Panics if there is no device.
    fn from(devices: &'a [On<T>]) -> Self {
        assert!(!devices.is_empty(), "there must be at least one device");
        Self(devices)
    }
}

/// Returns the threads for each of several devices that work at the same time: a pool for each
/// device of the CPU, and `None`, the current pool, for the others. A single device keeps the
/// current pool.
///
/// # Errors
/// [`Error::Plan`] for threads that cannot be started.
pub fn thread_pools(devices: &[Device]) -> Result<Vec<Option<ThreadPool>>> {
    #[cfg(feature = "flex")]
    return kv_device::threads::pools(devices)
        .map_err(|error| Error::plan("devices", devices.len(), error.to_string()));
    #[cfg(not(feature = "flex"))]
    Ok(devices.iter().map(|_| None).collect())
}

/// Ends the work of all devices when it is dropped: no part is left then, or one failed.
struct End<'a> {
    next: &'a AtomicUsize,
    n: usize,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.next.store(self.n, Ordering::Relaxed);
    }
}

/// A message of a device about one part.
enum Message<E> {
    Event(E),
    End(Result<()>),
}

impl<'a, T: Target> Devices<'a, T> {
    /// Returns the first device.
    pub fn first(self) -> &'a On<T> {
        &self.0[0]
    }

    /// Returns how many devices compute `n` parts.
    pub(crate) fn at_work(self, n: usize) -> usize {
        self.0.len().min(n).max(1)
    }

    /// Runs `work` for each of `n` parts on one of the devices, with the model on it. `start` runs
    /// first on each device. `receive` gets all events that `work` sends, on this thread and in the
    /// order of the parts. The work ends with the error of `receive`, or of the first part that
    /// fails.
    pub(crate) fn share_out<E: Send>(
        self,
        model: &LanguageModel,
        n: usize,
        start: impl Fn(&On<T>, &LanguageModel) -> Result<()> + Sync,
        work: impl Fn(&On<T>, &LanguageModel, usize, &mut dyn FnMut(E)) -> Result<()> + Sync,
        mut receive: impl FnMut(E) -> Result<()>,
    ) -> Result<()> {
        if self.0.len() == 1 || n < 2 {
            let first = self.first();
            start(first, model)?;
            return (0..n).try_for_each(|part| {
                let mut received = Ok(());
                work(first, model, part, &mut |event| {
                    if received.is_ok() {
                        received = receive(event);
                    }
                })?;
                received
            });
        }
        let plain: Vec<Device> = self.0.iter().map(|device| (**device).clone()).collect();
        let pools = thread_pools(&plain)?;
        let (next, (sender, receiver)) = (AtomicUsize::new(0), channel());
        let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&part| part < n);
        let (take, start, work, next) = (&take, &start, &work, &next);
        thread::scope(|scope| {
            for (device, pool) in self.0.iter().zip(pools) {
                let (model, sender) = (model.clone().to_device(device), sender.clone());
                let run = move || {
                    let _end = End { next, n };
                    let mut started = start(device, &model);
                    while let Some(part) = take() {
                        // Nobody receives after an error of another part.
                        let send = |message| drop(sender.send((part, message)));
                        let done = core::mem::replace(&mut started, Ok(())).and_then(|()| {
                            work(device, &model, part, &mut |event| send(Message::Event(event)))
                        });
                        let failed = done.is_err();
                        send(Message::End(done));
                        if failed {
                            break;
                        }
                    }
                };
                scope.spawn(move || match pool {
                    Some(pool) => pool.install(run),
                    None => run(),
                });
            }
            drop(sender);
            let received = in_order(receiver, receive);
            next.store(n, Ordering::Relaxed);
            received
        })
    }
}

/// Passes events on in the order of their parts, up to the first error.
fn in_order<E>(
    receiver: Receiver<(usize, Message<E>)>,
    mut receive: impl FnMut(E) -> Result<()>,
) -> Result<()> {
    let mut current = 0;
    let mut waiting: BTreeMap<usize, Vec<Message<E>>> = BTreeMap::new();
    for (part, message) in receiver {
        waiting.entry(part).or_default().push(message);
        while let Some(messages) = waiting.remove(&current) {
            let mut ended = false;
            for message in messages {
                match message {
                    Message::Event(event) => receive(event)?,
                    Message::End(done) => {
                        done?;
                        ended = true;
                    }
                }
            }
            if !ended {
                break;
            }
            current += 1;
        }
    }
    Ok(())
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::{sync::Mutex, time::Duration};

    use kv_cubecl::Flex;

    use super::*;

    fn model(device: &On<Flex>) -> LanguageModel {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/models");
        kv_models::load(format!("{golden}/llama-tiny"), device).expect("the model is there").model
    }

    /// Later parts take less time, so that they end before earlier ones.
    fn wait(part: usize) {
        thread::sleep(Duration::from_millis(if part.is_multiple_of(4) { 8 } else { 1 }));
    }

    #[test]
    fn events_come_in_the_order_of_the_parts() {
        let device = On::<Flex>::open().unwrap();
        let model = model(&device);
        for n_devices in 1..5 {
            let devices = vec![device.clone(); n_devices];
            for n in [0, 1, 2, 13] {
                let (started, mut events) = (AtomicUsize::new(0), vec![]);
                let start = |_: &On<Flex>, _: &LanguageModel| {
                    started.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                };
                let work = |_: &On<Flex>,
                            _: &LanguageModel,
                            part: usize,
                            send: &mut dyn FnMut((usize, usize))| {
                    (0..part % 3).for_each(|i| send((part, i)));
                    wait(part);
                    Ok(())
                };
                let receive = |event| {
                    events.push(event);
                    Ok(())
                };
                Devices::from(&devices[..]).share_out(&model, n, start, work, receive).unwrap();
                let expected = (0..n).flat_map(|part| (0..part % 3).map(move |i| (part, i)));
                assert_eq!(events, expected.collect::<Vec<_>>(), "{n_devices} devices, {n} parts");
                assert_eq!(started.into_inner(), if n < 2 { 1 } else { n_devices });
            }
        }
    }

    #[test]
    fn the_first_error_ends_the_work() {
        let device = On::<Flex>::open().unwrap();
        let model = model(&device);
        for n_devices in 1..5 {
            let devices = vec![device.clone(); n_devices];
            // Part 4 fails later than part 5.
            let done = Mutex::new(vec![]);
            let work =
                |_: &On<Flex>, _: &LanguageModel, part: usize, send: &mut dyn FnMut(usize)| {
                    wait(part);
                    if part == 4 || part == 5 {
                        return Err(Error::plan("part", part, "fails"));
                    }
                    done.lock().unwrap().push(part);
                    send(part);
                    Ok(())
                };
            let mut received = vec![];
            let receive = |part| {
                received.push(part);
                Ok(())
            };
            let devices = Devices::from(&devices[..]);
            let error = devices.share_out(&model, 1000, |_, _| Ok(()), work, receive).unwrap_err();
            assert_eq!(error.to_string(), "part 4: fails");
            assert_eq!(received, [0, 1, 2, 3]);
            assert!(done.lock().unwrap().len() < 40);
            // An error of the receiver.
            let receive = |part| match part {
                2 => Err(Error::Stopped),
                _ => Ok(()),
            };
            let error = devices.share_out(&model, 1000, |_, _| Ok(()), work, receive).unwrap_err();
            assert!(matches!(error, Error::Stopped));
            let start = |_: &On<Flex>, _: &LanguageModel| Err(Error::plan("start", 0, "fails"));
            let error = devices.share_out(&model, 9, start, work, |_| Ok(())).unwrap_err();
            assert_eq!(error.to_string(), "start 0: fails");
        }
    }
}
