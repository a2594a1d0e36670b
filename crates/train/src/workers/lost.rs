//! Errors of devices that fail, on this machine or on another one.

use core::any::Any;

use burn::tensor::Device;

use crate::Error;

/// Returns the error for a device whose work ended with a panic.
///
/// burn-remote gives an error to a read whose connection was lost, and Burn's reads turn it into a
/// panic.
pub(super) fn failed(device: &Device, panic: &(dyn Any + Send)) -> Error {
    let why = message(panic);
    match place(device) {
        Some(device) => {
            Error::Worker { device, why: format!("it ended its session ({why}); see its output") }
        }
        None => Error::Stopped(format!("device {device:?} failed: {why}")),
    }
}

/// Returns a function that turns a panic outside of the workers' shares into an error, if the first
/// of `devices` belongs to another machine. The first device holds the optimizer.
pub(crate) fn lost(devices: &[Device]) -> impl FnOnce(&(dyn Any + Send)) -> Option<Error> + use<> {
    let first = devices.first().filter(|device| place(device).is_some()).cloned();
    move |panic| first.map(|device| failed(&device, panic))
}

/// Returns the error of the first of `devices` that does not answer, or else `error`. Devices and
/// checkpoints that wait for data of a lost device fail as well, and may do so first.
pub(crate) fn blame(error: Error, devices: &[Device]) -> Error {
    let (Error::Worker { .. } | Error::Stopped(_)) = &error else { return error };
    let lost = devices.iter().find(|device| !answers(device)).and_then(place);
    match lost {
        Some(device) => Error::Worker { device, why: "it does not answer".to_string() },
        None => error,
    }
}

/// Returns the message of a panic on one line: the cause, if it is an error of Burn.
fn message(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
    let message = message.unwrap_or("it gave no reason");
    let cause = message.rsplit_once("Caused by:").map_or(message, |(_, cause)| cause);
    cause.trim().lines().next().unwrap_or_default().trim_end().to_string()
}

/// Returns the name of a device of another machine, as in a list of devices.
#[cfg(feature = "remote")]
pub(super) fn place(device: &Device) -> Option<String> {
    kv_device::remote::name(device)
}

/// Returns whether the machine of a device answers.
#[cfg(feature = "remote")]
fn answers(device: &Device) -> bool {
    kv_device::remote::answers(device)
}

/// Without the feature, all devices belong to this machine.
#[cfg(not(feature = "remote"))]
pub(super) fn place(_: &Device) -> Option<String> {
    None
}

#[cfg(not(feature = "remote"))]
fn answers(_: &Device) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line() {
        let panic: Box<dyn Any + Send> = Box::new("first\n   at second".to_string());
        assert_eq!(message(&*panic), "first");
        let cause = "cannot read: An error happened\nCaused by:\n  connection lost\n".to_string();
        assert_eq!(message(&cause), "connection lost");
        assert_eq!(message(&1), "it gave no reason");
        assert!(lost(&[])(&*panic).is_none());
    }
}
