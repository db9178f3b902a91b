//! Copies of modules with separate parameters, and detection of clones that share parameter IDs.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Device, Int, Tensor};

use super::is_buffer;
use crate::Result;

/// Returns a copy of a module with its own parameters and statistics, for example for a stack of
/// equal layers, or for the target network of a reinforcement learner.
///
/// A clone of a burn module keeps the parameter IDs, by which optimizers find gradients, and shares
/// running statistics. Training refuses models with such clones. The values of the copy are those
/// of the original. A frozen module gives a frozen copy.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Device;
/// use stoker_trainer::deep_copy;
///
/// #[derive(Debug, Module)]
/// struct Dqn {
///     online: Linear,
///     target: Linear,
/// }
///
/// fn build(device: &Device) -> Dqn {
///     let online = LinearConfig::new(4, 2).init(device);
///     Dqn { target: deep_copy(&online).freeze(), online }
/// }
/// # build(&stoker_trainer::host());
/// ```
pub fn deep_copy<M: Module>(module: &M) -> M {
    // A clone, also with mapped values, would share the running statistics.
    let copy = module.valid();
    let copy = if module.devices().iter().any(Device::is_autodiff) { copy.train() } else { copy };
    with_new_ids(copy)
}

/// Gives each parameter a new ID. Loaded parameters have the IDs of their file, so two modules that
/// were loaded from one file would share them.
pub(crate) fn with_new_ids<M: Module>(module: M) -> M {
    struct NewIds;
    impl ModuleMapper for NewIds {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (_, tensor, mapper) = param.consume();
            Param::from_mapped_value(ParamId::new(), tensor, mapper)
        }

        fn map_int<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Int>>,
        ) -> Param<Tensor<D, Int>> {
            let (_, tensor, mapper) = param.consume();
            Param::from_mapped_value(ParamId::new(), tensor, mapper)
        }

        fn map_bool<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Bool>>,
        ) -> Param<Tensor<D, Bool>> {
            let (_, tensor, mapper) = param.consume();
            Param::from_mapped_value(ParamId::new(), tensor, mapper)
        }
    }
    module.map(&mut NewIds)
}

/// Fails if two parameters of an [initialized](super::initialize) model have the same ID. Gradients
/// are found by ID: one parameter would get those of the other, which would not be trained. Frozen
/// clones count too: before its first use, a layer is frozen together with its clones. Buffers are
/// not found by ID.
pub(crate) fn check_clones<M: Module>(model: &M) -> Result<()> {
    #[derive(Default)]
    struct Walk {
        path: Vec<String>,
        /// Path of the first parameter with each ID.
        first: BTreeMap<ParamId, String>,
        shared: Option<(String, String)>,
    }
    impl ModuleVisitor for Walk {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if is_buffer(param.id) || self.shared.is_some() {
                return;
            }
            let path = self.path.join(".");
            if let Some(first) = self.first.insert(param.id, path.clone()) {
                self.shared = Some((first, path));
            }
        }
    }
    let mut walk = Walk::default();
    model.visit(&mut walk);
    let Some((first, second)) = walk.shared else { return Ok(()) };
    Err(format!(
        "{second} is a clone of {first}, so only one of them would be trained; build each layer \
         with its own `init`, or copy it with `stoker_trainer::deep_copy`; for tied weights, keep \
         one field and use it twice"
    )
    .into())
}

/// Returns the IDs of all floating-point parameters, and whether each is trained.
pub(crate) fn parameter_ids<M: Module>(model: &M) -> Vec<(ParamId, bool)> {
    struct Ids(Vec<(ParamId, bool)>);
    impl ModuleVisitor for Ids {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push((param.id, param.is_require_grad()));
        }
    }
    let mut ids = Ids(vec![]);
    model.visit(&mut ids);
    ids.0
}
