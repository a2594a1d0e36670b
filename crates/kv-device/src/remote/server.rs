//! Servers of remote devices: how to open a device, its name, and whether its server answers.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    panic::{self, AssertUnwindSafe},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use burn::{
    backend::DispatchDevice,
    remote::{ConnectError, RemoteHost},
    tensor::Device,
};

/// The time in which a server that works answers.
const PATIENCE: Duration = Duration::from_secs(5);

/// The time that a server may take to start.
const START: Duration = Duration::from_secs(2);

/// The opened devices with their addresses, which Burn does not tell.
static OPENED: Mutex<Vec<(Device, String)>> = Mutex::new(Vec::new());

fn opened() -> MutexGuard<'static, Vec<(Device, String)>> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a device of the server at `address`, which is `HOST:PORT`.
///
/// # Errors
/// A server that cannot be reached, refuses the token, or has no such device.
pub fn open(address: &str, index: usize, token: Option<&str>) -> Result<Device, ConnectError> {
    // Burn would try for 16 seconds, and wait forever for a server that does not answer.
    reach(address).map_err(|error| ConnectError::Unreachable { reason: error.to_string() })?;
    let mut host = RemoteHost::websocket(&format!("ws://{address}"));
    if let Some(token) = token {
        host = host.with_credential(token);
    }
    let device = Device::remote_options(&host).device_index(index).init()?;
    opened().push((device.clone(), address.to_string()));
    Ok(device)
}

/// Returns the name of a remote device as users write it, `remote:HOST:PORT/INDEX`; `None` for
/// other devices. A device that was not opened by [`open`] has no address.
pub fn name(device: &Device) -> Option<String> {
    let plain = device.clone().without_autodiff();
    #[allow(irrefutable_let_patterns, reason = "Burn may have been built with no other backend")]
    let DispatchDevice::Remote(remote) = plain.as_dispatch() else { return None };
    let address = address(&plain).unwrap_or_else(|| "HOST:PORT".to_string());
    Some(format!("remote:{address}/{}", remote.device_index()))
}

/// Returns whether the server of a device answers. A device that was not opened by [`open`] counts
/// as one that does.
pub fn answers(device: &Device) -> bool {
    address(&device.clone().without_autodiff()).is_none_or(|address| ask(&address).is_ok())
}

/// Returns whether the servers of all opened devices answer.
pub fn all_answer() -> bool {
    let devices = opened().clone();
    devices.iter().all(|(_, address)| ask(address).is_ok())
}

/// Returns the name of the first opened device that was lost, and the reason.
pub fn lost() -> Option<(String, &'static str)> {
    let devices = opened().clone();
    devices.into_iter().find_map(|(device, address)| {
        let why = if ask(&address).is_err() {
            "it does not answer"
        } else if !panic::catch_unwind(AssertUnwindSafe(|| device.sync().is_ok())).unwrap_or(false)
        {
            "it ended its session"
        } else {
            return None;
        };
        Some((name(&device)?, why))
    })
}

/// Asks the server at `address` for a page, which it does not have but answers.
///
/// # Errors
/// A server that does not answer within 5 seconds.
pub fn ask(address: &str) -> io::Result<()> {
    let unknown = || io::Error::new(ErrorKind::NotFound, "the name has no address");
    let socket = address.to_socket_addrs()?.next().ok_or_else(unknown)?;
    let mut stream = TcpStream::connect_timeout(&socket, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(stream, "GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    match stream.read(&mut [0]) {
        Ok(0) => Err(ErrorKind::ConnectionReset.into()),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Err(ErrorKind::TimedOut.into()),
        Err(error) => Err(error),
    }
}

/// Waits for a server that starts.
fn reach(address: &str) -> io::Result<()> {
    let started = Instant::now();
    loop {
        match ask(address) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                if started.elapsed() > START {
                    return Err(error);
                }
                thread::sleep(Duration::from_millis(100));
            }
            other => return other,
        }
    }
}

/// Returns the address of a device without autodiff.
fn address(device: &Device) -> Option<String> {
    opened().iter().find(|(known, _)| known == device).map(|(_, address)| address.clone())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_server_that_is_gone_or_silent_does_not_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let closes = thread::spawn(move || drop(listener.accept()));
        assert!(ask(&address).is_err());
        closes.join().unwrap();
        let started = Instant::now();
        let Err(ConnectError::Unreachable { reason }) = open(&address, 0, None) else {
            panic!("nothing listens there");
        };
        assert!(reason.contains("refused"), "{reason}");
        assert!(started.elapsed() < 3 * START);
        assert!(ask("127.0.0.1").is_err());
    }
}
