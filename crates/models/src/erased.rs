//! Burn's [`Module`] behind a pointer.
//!
//! [`Module::visit`] and [`Module::map`] are generic over the visitor, and a visitor's methods over
//! the rank of a parameter, so there is no `dyn Module`. Here both become object-safe: [`Forward`] is
//! the visitor that a module sees; it passes every parameter on as `dyn Any` with its rank, and the
//! other end, [`AnyVisitor`] or [`AnyMapper`] for the visitor that the caller has, turns it back into
//! a parameter of that rank.

use std::any::Any;

use burn::{
    module::{
        Devices, DisplaySettings, Flag, Module, ModuleDisplay, ModuleMapper, ModuleVisitor, Param,
    },
    tensor::{Bool, Device, Int, Tensor},
};

use crate::Decoder;

/// A [`Decoder`] that is a [`Module`], whatever its type.
pub(crate) trait Erased: Any + Send + Sync {
    fn decoder(&self) -> &dyn Decoder;
    fn boxed_clone(&self) -> Box<dyn Erased>;
    fn accept(&self, visitor: &mut dyn AnyVisitor);
    fn changed(self: Box<Self>, change: Change<'_>) -> Box<dyn Erased>;
    fn validation(&self) -> Box<dyn Erased>;
    fn add_devices(&self, devices: Devices) -> Devices;
    fn display(&self, settings: DisplaySettings) -> String;
}

/// What consumes a module and gives another one of the same type.
pub(crate) enum Change<'a> {
    Map(&'a mut dyn AnyMapper),
    ToDevice(&'a Device),
    Fork(&'a Device),
    Train,
    Materialize,
}

impl<M: Decoder + Module + ModuleDisplay> Erased for M {
    fn decoder(&self) -> &dyn Decoder {
        self
    }

    fn boxed_clone(&self) -> Box<dyn Erased> {
        Box::new(self.clone())
    }

    fn accept(&self, visitor: &mut dyn AnyVisitor) {
        self.visit(&mut Forward(visitor));
    }

    fn changed(self: Box<Self>, change: Change<'_>) -> Box<dyn Erased> {
        Box::new(match change {
            Change::Map(mapper) => self.map(&mut Forward(mapper)),
            Change::ToDevice(device) => self.to_device(device),
            Change::Fork(device) => self.fork(device),
            Change::Train => self.train(),
            Change::Materialize => self.materialize(),
        })
    }

    fn validation(&self) -> Box<dyn Erased> {
        Box::new(self.valid())
    }

    fn add_devices(&self, devices: Devices) -> Devices {
        self.collect_devices(devices)
    }

    fn display(&self, settings: DisplaySettings) -> String {
        self.format(settings)
    }
}

/// A [`ModuleVisitor`] that gets parameters without their types: a `Param` of a float, int or bool
/// tensor of `rank`.
pub(crate) trait AnyVisitor {
    fn float(&mut self, rank: usize, param: &dyn Any);
    fn int(&mut self, rank: usize, param: &dyn Any);
    fn bool(&mut self, rank: usize, param: &dyn Any);
    fn flag(&mut self, flag: &Param<Flag>);
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
}

/// A [`ModuleMapper`] that gets parameters without their types, and gives back others of the same
/// types.
pub(crate) trait AnyMapper {
    fn float(&mut self, rank: usize, param: Box<dyn Any>) -> Box<dyn Any>;
    fn int(&mut self, rank: usize, param: Box<dyn Any>) -> Box<dyn Any>;
    fn bool(&mut self, rank: usize, param: Box<dyn Any>) -> Box<dyn Any>;
    fn flag(&mut self, flag: Param<Flag>) -> Param<Flag>;
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
}

/// Passes everything on to a visitor or mapper without its type.
struct Forward<'a, T: ?Sized>(&'a mut T);

/// Evaluates `$body` with the constant `$D` equal to `$rank`, which [`rank`] has checked.
macro_rules! with_rank {
    ($rank:expr, $D:ident => $body:expr) => {
        with_rank!($rank, $D => $body; 0 1 2 3 4 5 6 7 8)
    };
    ($rank:expr, $D:ident => $body:expr; $($n:literal)*) => {
        match $rank {
            $($n => { const $D: usize = $n; $body })*
            rank => unreachable!("rank {rank} does not compile"),
        }
    };
}

/// `D`, which is a rank of `with_rank`: a module with a parameter of another one does not compile.
fn rank<const D: usize>() -> usize {
    const { assert!(D <= 8, "parameters have at most 8 dimensions") }
    D
}

fn borrowed<P: 'static>(param: &dyn Any) -> &P {
    param.downcast_ref().expect("the rank and kind were passed on with it")
}

fn owned<P: 'static>(param: Box<dyn Any>) -> P {
    *param.downcast().expect("the rank and kind were passed on with it")
}

impl ModuleVisitor for Forward<'_, dyn AnyVisitor + '_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.float(rank::<D>(), param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.0.int(rank::<D>(), param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.0.bool(rank::<D>(), param);
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.0.flag(flag);
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        self.0.enter(name, container);
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        self.0.exit(name, container);
    }
}

impl<V: ModuleVisitor> AnyVisitor for V {
    fn float(&mut self, rank: usize, param: &dyn Any) {
        with_rank!(rank, D => self.visit_float::<D>(borrowed(param)));
    }

    fn int(&mut self, rank: usize, param: &dyn Any) {
        with_rank!(rank, D => self.visit_int::<D>(borrowed(param)));
    }

    fn bool(&mut self, rank: usize, param: &dyn Any) {
        with_rank!(rank, D => self.visit_bool::<D>(borrowed(param)));
    }

    fn flag(&mut self, flag: &Param<Flag>) {
        self.visit_flag(flag);
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.exit_module(name, container);
    }
}

impl ModuleMapper for Forward<'_, dyn AnyMapper + '_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        owned(self.0.float(rank::<D>(), Box::new(param)))
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        owned(self.0.int(rank::<D>(), Box::new(param)))
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        owned(self.0.bool(rank::<D>(), Box::new(param)))
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.0.flag(flag)
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        self.0.enter(name, container);
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        self.0.exit(name, container);
    }
}

impl<M: ModuleMapper> AnyMapper for M {
    fn float(&mut self, rank: usize, param: Box<dyn Any>) -> Box<dyn Any> {
        with_rank!(rank, D => Box::new(self.map_float::<D>(owned(param))))
    }

    fn int(&mut self, rank: usize, param: Box<dyn Any>) -> Box<dyn Any> {
        with_rank!(rank, D => Box::new(self.map_int::<D>(owned(param))))
    }

    fn bool(&mut self, rank: usize, param: Box<dyn Any>) -> Box<dyn Any> {
        with_rank!(rank, D => Box::new(self.map_bool::<D>(owned(param))))
    }

    fn flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.map_flag(flag)
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.exit_module(name, container);
    }
}
