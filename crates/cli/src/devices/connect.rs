//! Opens devices of workers, and ends the program if a worker is lost.

use std::{
    panic::{self, AssertUnwindSafe},
    process::exit,
    sync::{
        Once, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Error, Result, anyhow};
use burn::{remote::ConnectError, tensor::Device};
use kv_device::remote;
use kv_models::remote::VERSION;

use super::{
    places::Place,
    workers::{WorkerArgs, WorkerToken},
};
use crate::Screen;

/// Opens devices of workers, and watches the workers from now on.
///
/// # Errors
/// A worker that cannot be reached, refuses the token, or has no such device.
pub(super) fn connect(places: &[Place], args: &WorkerArgs) -> Result<Vec<Device>> {
    static HOOK: Once = Once::new();
    let token = args.token.read()?;
    let devices: Vec<Device> =
        places.iter().map(|place| open(place, token.as_ref())).collect::<Result<_>>()?;
    HOOK.call_once(|| {
        let print = panic::take_hook();
        // Reads from a lost worker panic. The error that names the worker is enough.
        panic::set_hook(Box::new(move |panic| {
            if remote::all_answer() {
                print(panic);
            }
        }));
    });
    for (i, Place { address, .. }) in places.iter().enumerate() {
        if places[..i].iter().all(|other| other.address != *address) {
            watch(address.clone(), args.deadline());
        }
    }
    Ok(devices)
}

fn open(place: &Place, token: Option<&WorkerToken>) -> Result<Device> {
    let Place { address, index } = place;
    let device = remote::open(address, *index, token.map(WorkerToken::secret));
    let checked = device.map_err(|error| reason(address, error, token.is_some())).and_then(
        |device| match remote::version(&device) {
            Some(version) if version == VERSION => Ok(device),
            Some(version) => Err(format!(
                "{address} has version {version}, and this program version {VERSION}; build both \
                 from the same version"
            )),
            None => Err(format!("{address} is no worker; start kv-train worker there")),
        },
    );
    checked.map_err(|why| {
        let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
        anyhow!("devices remote:{place}: {why}")
    })
}

/// Says why a worker gives no device, and what to do.
fn reason(address: &str, error: ConnectError, has_token: bool) -> String {
    match error {
        ConnectError::Unauthorized => {
            let which = if has_token { "another token" } else { "a token" };
            format!(
                "{address} asks for {which}; set KV_WORKER_TOKEN or --token-file to the token that \
                 the worker was started with"
            )
        }
        ConnectError::NoSuchDevice { device_count } => {
            let last = device_count.saturating_sub(1);
            format!("{address} has devices 0 to {last}; name one of them")
        }
        ConnectError::IncompatibleProtocol { client_version, server_version } => format!(
            "{address} speaks version {server_version} of Burn's remote protocol, and this program \
             version {client_version}; build both from the same version"
        ),
        ConnectError::Unreachable { reason } => format!(
            "{address} cannot be reached: {reason}; start kv-train worker --listen {address} there"
        ),
        ConnectError::Handshake { reason } => format!(
            "{address} does not answer as a worker does: {reason}; build both from the same version"
        ),
        other => format!("{address} gives no device: {other}"),
    }
}

/// True once the program ends with an error, which is printed once.
static FAILED: AtomicBool = AtomicBool::new(false);

static BEFORE_EXIT: OnceLock<fn()> = OnceLock::new();

/// Calls `restore` before the program ends because a worker does not answer.
pub fn before_exit(restore: fn()) {
    let _ = BEFORE_EXIT.set(restore);
}

/// Ends the program if a worker does not answer until the deadline. A read from such a worker
/// blocks its thread, and nothing else ends it.
fn watch(address: String, deadline: Duration) {
    const POLL: Duration = Duration::from_secs(1);
    thread::spawn(move || {
        let mut answered = Instant::now();
        loop {
            match remote::ask(&address) {
                Ok(()) => answered = Instant::now(),
                Err(_) if answered.elapsed() >= deadline => break,
                Err(_) => {}
            }
            thread::sleep(POLL);
        }
        // The main thread may report the same loss.
        if FAILED.swap(true, Ordering::SeqCst) {
            return;
        }
        if let Some(restore) = BEFORE_EXIT.get() {
            restore();
        }
        let _ = Screen::Error.line(format_args!(
            "error: worker {address}: has not answered for {} seconds, the limit of \
             --worker-deadline; start it again, or continue on other devices",
            deadline.as_secs()
        ));
        exit(1);
    });
}

/// Runs a program. If a worker was lost, names it in the error, or instead of a panic.
pub(crate) fn guarded(run: impl FnOnce() -> Result<()>) -> Result<()> {
    let lost = || {
        let (name, why) = remote::lost()?;
        Some(format!(
            "worker {name}: {why}; see its output, and start it again or continue on other devices"
        ))
    };
    let done = match panic::catch_unwind(AssertUnwindSafe(run)) {
        Ok(Err(error)) if !error.to_string().starts_with("worker ") => Err(match lost() {
            Some(why) => error.context(why),
            None => error,
        }),
        Ok(done) => done,
        Err(panic) => Err(lost().map_or_else(|| panic::resume_unwind(panic), Error::msg)),
    };
    if done.is_err() && FAILED.swap(true, Ordering::SeqCst) {
        // The thread that watches the workers has printed its error and ends the program.
        loop {
            thread::park();
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_is_one_line_with_what_to_do() {
        let unreachable = ConnectError::Unreachable { reason: "refused".into() };
        let version = ConnectError::IncompatibleProtocol { client_version: 3, server_version: 4 };
        for (error, has_token, parts) in [
            (ConnectError::Unauthorized, false, &["asks for a token", "KV_WORKER_TOKEN"][..]),
            (ConnectError::Unauthorized, true, &["another token", "--token-file"][..]),
            (ConnectError::NoSuchDevice { device_count: 2 }, true, &["devices 0 to 1"][..]),
            (unreachable, true, &["cannot be reached", "kv-train worker --listen a:1"][..]),
            (version, true, &["version 4", "version 3", "same version"][..]),
        ] {
            let why = reason("a:1", error, has_token);
            parts.iter().for_each(|part| assert!(why.contains(part), "{part}: {why}"));
            assert!(!why.contains('\n'));
        }
    }
}
