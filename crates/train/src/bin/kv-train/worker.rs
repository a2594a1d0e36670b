//! `kv-train worker`.

use std::{
    io::{self, IsTerminal},
    net::{TcpListener, ToSocketAddrs},
};

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::Device;
use kv_cli::{Backend, DeviceList, Screen, TokenArgs, WorkerArgs, not_built_in};
use kv_models::kv_cubecl::{On, Target};
use kv_train::{Operations, Worker};
use tracing_subscriber::filter::LevelFilter;

/// Arguments of `kv-train worker`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Address to listen on. An address other than this machine's own (127.0.0.1) needs a token.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:3000")]
    listen: String,
    /// Backend of the devices.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// Devices to serve, instead of --backend: flex:2, wgpu:0,1 or cuda:0-7. Clients count them
    /// from 0 in this order.
    #[arg(long, value_name = "LIST", conflicts_with = "backend")]
    devices: Option<DeviceList>,
    #[command(flatten)]
    token: TokenArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match args.devices.as_ref().map_or(args.backend, DeviceList::backend) {
        #[cfg(feature = "flex")]
        Backend::Flex => serve::<kv_models::kv_cubecl::Flex>(args),
        #[cfg(feature = "wgpu")]
        Backend::Wgpu => serve::<kv_models::kv_cubecl::Wgpu>(args),
        #[cfg(feature = "cuda")]
        Backend::Cuda => serve::<kv_models::kv_cubecl::Cuda>(args),
        Backend::Remote => bail!("devices: a worker serves devices of this machine; try flex:1"),
        #[allow(unreachable_patterns, reason = "with every backend built in")]
        other => Err(not_built_in(other, env!("CARGO_BIN_NAME"))),
    }
}

fn serve<T: Target>(args: &Args) -> Result<()>
where
    T::Backend: Operations,
{
    let listener = listen(&args.listen)?;
    let address = listener.local_addr().context("listen: no address")?;
    let token = args.token.read()?;
    ensure!(
        token.is_some() || address.ip().is_loopback(),
        "listen {address}: other machines can reach it, so it needs a token; set KV_WORKER_TOKEN \
         or --token-file, or listen on 127.0.0.1"
    );
    let devices = DeviceList::open_or_default::<T>(args.devices.as_ref(), &WorkerArgs::default())?;
    let devices: Vec<Device> = devices.iter().map(|device: &On<T>| (**device).clone()).collect();
    let n = devices.len();
    let mut worker = Worker::new::<T::Backend>(devices);
    if let Some(token) = &token {
        worker = worker.with_token(token.secret())?;
    }
    // Burn would otherwise print every session to standard output.
    let log = tracing_subscriber::fmt().with_max_level(LevelFilter::WARN);
    let _ = log.with_writer(io::stderr).with_ansi(io::stderr().is_terminal()).try_init();
    let plural = if n == 1 { "device" } else { "devices" };
    let name = T::NAME;
    Screen::Out.line(format_args!("serving {n} {name} {plural} on {address}; Ctrl-C ends it"))?;
    Ok(worker.serve(listener)?)
}

/// Binds the address, and no other.
fn listen(text: &str) -> Result<TcpListener> {
    let rule = || format!("listen {text:?}: must be HOST:PORT, with an IPv6 address in brackets");
    let address = text.to_socket_addrs().with_context(rule)?.next().with_context(rule)?;
    TcpListener::bind(address)
        .with_context(|| format!("listen {text}: cannot bind it; choose another address or port"))
}
