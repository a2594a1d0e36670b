//! Both ends of an operation: [`call`] on the client, [`with_op`] and [`answer`] on the server.

use core::any::Any;
use std::panic::{self, AssertUnwindSafe};

use burn::{
    backend::{
        Remote,
        ir::{BackendIr, CustomOpIr, TensorIr},
    },
    remote::CustomOpClient,
    server::RemoteServer,
};
use burn_fusion::custom::TensorSpec;

use super::{
    arguments::{from_scalars, to_scalars},
    malformed::Malformed,
    message::{Incoming, Outgoing},
    wire::Output,
};

/// Sends the operation `id` to the server of its inputs, and returns its outputs.
///
/// # Panics
/// If there is no tensor among the inputs, or `outputs` do not fit `O`: both are errors in
/// the table of operations.
pub fn call<O: Output>(message: Outgoing, id: &str, outputs: Vec<TensorSpec>) -> O::Value<Remote> {
    let Outgoing { device, inputs, arguments } = message;
    let Some(device) = device else { panic!("{id} has no input tensor") };
    let client = CustomOpClient::new(&device);
    let output =
        |TensorSpec { shape, dtype }| TensorIr::uninit(client.create_empty_handle(), shape, dtype);
    let operation = CustomOpIr {
        id: id.to_string(),
        inputs,
        outputs: outputs.into_iter().map(output).collect(),
        scalars: to_scalars(&arguments),
    };
    let mut tensors = client.register(operation).into_iter();
    O::build(&mut tensors).unwrap_or_else(|| panic!("{id} describes too few outputs"))
}

/// Hands the outputs of an operation to its client.
///
/// # Errors
/// A client that expects another number of tensors.
pub fn answer<O: Output, B: BackendIr>(
    message: &mut Incoming<'_, B>,
    outputs: O::Value<B>,
) -> Result<(), Malformed> {
    O::publish(outputs, &mut message.answer())
}

/// Lets `server` run the operation `id` on backend `B`.
///
/// Burn ends the session of a client whose operation panics, and keeps serving the others. So a
/// malformed message, or an operation that panics, does so here with the name of the operation.
pub fn with_op<B: BackendIr>(
    server: RemoteServer,
    id: &'static str,
    run: impl Fn(&mut Incoming<'_, B>) -> Result<(), Malformed> + Send + Sync + 'static,
) -> RemoteServer {
    server.with_custom_op::<B, _>(id, move |handles, operation, _| {
        let ran = panic::catch_unwind(AssertUnwindSafe(|| {
            let arguments = from_scalars(&operation.scalars)?;
            let (inputs, outputs) = (&*operation.inputs, &*operation.outputs);
            run(&mut Incoming::new(handles, inputs, outputs, &arguments))
        }));
        match ran {
            Ok(Ok(())) => {}
            Ok(Err(why)) => panic!("operation {id}: malformed message: {why}"),
            Err(panic) => panic!("operation {id}: {}", message_of(&*panic)),
        }
    })
}

/// Returns the message of a panic.
fn message_of(panic: &(dyn Any + Send)) -> &str {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it gave no reason")
}
