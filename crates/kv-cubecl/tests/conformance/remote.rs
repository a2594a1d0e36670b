//! Operations on a remote device, whose server runs them on the CPU: bit for bit what the CPU
//! computes itself.

mod operations;

use std::sync::OnceLock;

use burn::{
    remote::ConnectError,
    server::{RemoteServer, TokenAuthorizer},
    tensor::{Device, TensorData},
};
use kv_cubecl::{Error, KvCache, KvCacheConfig, On, Remote, Target};
use kv_device::remote::Loopback;

use self::operations::{caches, delta, quantizers, sparse, streams};
use crate::common::{Setup, attend, snapshot};

const TOKEN: &str = "a token";

/// Returns a server of two devices of the CPU.
fn server() -> &'static Loopback {
    static SERVER: OnceLock<Loopback> = OnceLock::new();
    SERVER.get_or_init(|| {
        let server = RemoteServer::new([Device::flex(), Device::flex()])
            .with_authorizer(TokenAuthorizer::new(TOKEN).unwrap());
        let server = kv_cubecl::remote::serve_ops::<burn::backend::Flex>(server);
        Loopback::serve(&server).unwrap()
    })
}

pub(crate) fn device() -> Device {
    server().device(0, Some(TOKEN)).unwrap()
}

/// Compares the outputs of operations on both devices.
#[track_caller]
fn same(operations: fn(&Device) -> Vec<(&'static str, TensorData)>) {
    let here = operations(&Device::flex());
    let there = operations(&device());
    assert_eq!(here.len(), there.len());
    for ((name, here), (_, there)) in here.into_iter().zip(there) {
        assert_eq!((here.shape(), here.dtype()), (there.shape(), there.dtype()), "{name}");
        assert!(here.as_bytes() == there.as_bytes(), "{name}: other bits");
    }
}

#[test]
fn quantizers_are_the_same() {
    same(quantizers);
}

#[test]
fn caches_are_the_same() {
    same(caches);
}

#[test]
fn streams_and_their_gradients_are_the_same() {
    same(streams);
}

#[test]
fn sparse_attention_is_the_same() {
    same(sparse);
}

#[test]
fn the_delta_rule_is_the_same() {
    same(delta);
}

/// The functions for users, in which tensors live long and are views of each other.
#[test]
fn whole_caches_are_the_same() {
    let [here, there] = [Device::flex(), device()];
    let there = On::<Remote>::new(there).unwrap();
    let here = On::<kv_cubecl::Flex>::new(here).unwrap();
    for (seed, name) in
        ["k4v2-g32-r32", "kint8vint8-s3", "kvn2vvn2-gflush", "float"].into_iter().enumerate()
    {
        let text = Setup::new(name, [2, 4, 2, 300, 64], 900 + seed as u64);
        let (mut one, mut other) = (text.cache(&here), text.cache(&there));
        let chunks = [1, 130, 1, 1, 129, 1, 37];
        attend(&mut one, &text.tokens(0..300), &chunks, &here);
        attend(&mut other, &text.tokens(0..300), &chunks, &there);
        assert!(snapshot(&one) == snapshot(&other), "{name}");
    }
}

#[test]
fn a_wrong_token_and_a_wrong_index_are_refused() {
    let refused = |index, token| server().device(index, Some(token)).unwrap_err();
    assert!(matches!(refused(0, "other"), ConnectError::Unauthorized));
    assert!(matches!(refused(2, TOKEN), ConnectError::NoSuchDevice { device_count: 2 }));
}

#[test]
fn the_target_names_no_host() {
    let error = On::<Remote>::open().unwrap_err();
    assert!(matches!(error, Error::NoDevice { .. }));
    assert!(error.to_string().contains("--devices remote:HOST:PORT/INDEX"), "{error}");
    let error = On::<Remote>::new(Device::flex()).unwrap_err();
    assert!(matches!(error, Error::WrongTarget { target: "remote", .. }));
    assert!(Remote::hosts(&device()));
}

/// A server that does not know the operations of this crate ends the session. A read then fails,
/// and nothing hangs.
#[test]
fn a_server_without_the_operations_fails_the_read() {
    let server = Loopback::serve(&RemoteServer::new([Device::flex()])).unwrap();
    let device = server.device(0, None).unwrap();
    let config: KvCacheConfig = "k4v4".parse().unwrap();
    let shape = kv_cubecl::CacheShape::new(1, 1, 64);
    let mut cache = KvCache::new(&config.with_capacity(64), shape, &device).unwrap();
    let token = || burn::tensor::Tensor::<4>::ones([1, 1, 1, 64], &device);
    let output = cache.attend(token(), token(), token()).unwrap().output;
    assert!(output.try_into_data().is_err());
}
