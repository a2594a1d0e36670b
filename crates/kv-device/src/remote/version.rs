//! The version of the operations of a server: a client of another version may send messages that
//! the server does not understand.

use core::iter;
use std::panic::{self, AssertUnwindSafe};

use burn::{
    backend::{
        DispatchDevice, Remote, RemoteDevice,
        ir::BackendIr,
        ops::{FloatTensorOps, IntTensorOps},
        tensor::IntTensor,
    },
    server::RemoteServer,
    tensor::{DType, Device, FloatDType, Shape, TensorData},
};
use burn_fusion::custom::TensorSpec;
use tokio::runtime::Builder;

use super::{call, message::Outgoing, wire::Int};

const ID: &str = "kv_device.version";

/// The length of a version, padded with zeros.
const LENGTH: usize = 32;

/// Lets `server` tell clients the version of its operations.
pub fn serve_version<B: BackendIr>(server: RemoteServer, version: &str) -> RemoteServer {
    let bytes = version.bytes().chain(iter::repeat(0)).take(LENGTH);
    let numbers: Vec<i32> = bytes.map(i32::from).collect();
    server.with_custom_op::<B, _>(ID, move |handles, operation, device| {
        let Some(output) = operation.outputs.first() else { panic!("{ID}: no output") };
        let version = B::int_from_data(TensorData::new(numbers.clone(), [LENGTH]), device);
        handles.register_int_tensor::<B>(&output.id, version);
    })
}

/// Returns the version of the operations of a device's server; `None` if it has no operations of
/// this workspace.
pub fn version(device: &Device) -> Option<String> {
    let plain = device.clone().without_autodiff();
    #[allow(irrefutable_let_patterns, reason = "Burn may have been built with no other backend")]
    let DispatchDevice::Remote(remote) = plain.as_dispatch() else { return None };
    // A server that does not know an operation ends the session, and some reads then panic.
    panic::catch_unwind(AssertUnwindSafe(|| read(ask(remote)))).ok().flatten()
}

fn ask(device: &RemoteDevice) -> IntTensor<Remote> {
    let mut message = Outgoing::new();
    // An operation is sent to the device of its inputs.
    message.tensor(Remote::float_zeros(Shape::new([1]), device, FloatDType::F32));
    call::<Int>(message, ID, vec![TensorSpec::new(Shape::new([LENGTH]), DType::I32)])
}

fn read(version: IntTensor<Remote>) -> Option<String> {
    let runtime = Builder::new_current_thread().build().ok()?;
    let data = runtime.block_on(Remote::int_into_data(version)).ok()?;
    let bytes: Option<Vec<u8>> = data.iter::<i32>().map(|byte| u8::try_from(byte).ok()).collect();
    let text = String::from_utf8(bytes?).ok()?;
    Some(text.trim_end_matches('\0').to_string())
}
