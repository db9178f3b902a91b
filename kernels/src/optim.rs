//! Optimizers that update each parameter in one pass, on CPUs bit-identical to burn's.

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, ModuleOptimizer, Optimizer, SgdConfig};
use burn::serde::de::DeserializeOwned;
use burn::serde::{Deserialize, Serialize};

mod adam;
mod pass;
mod sgd;

pub use adam::{FusedAdam, FusedAdamW};
pub use sgd::FusedSgd;

/// Fused optimizer with the configuration of burn's.
///
/// ```
/// use burn::optim::AdamConfig;
/// use stoker_kernels::OptimizerConfigExt;
///
/// let optimizer = AdamConfig::new().with_beta_1(0.8).init_fused();
/// assert!(optimizer.to_record().is_empty());
/// ```
///
/// On CPUs, weights and states are bit-identical to those of burn's optimizer after any number of
/// steps, except with clipping by norm of parameters with 4 Mi (4 * 1024 * 1024) elements or more:
/// their bits do not depend on the threads, as they do with burn's optimizer.
///
/// Records have the same layout, so either optimizer continues from the record of the other.
///
/// On GPUs, one kernel updates a parameter from the second step on, and results may differ from
/// burn's by rounding.
///
/// Parameters on other backends or of another type than `f32`, and all parameters with AMSGrad, are
/// updated by the operators of burn's optimizer. So are parameters on GPUs in the first step, and
/// with SGD without momentum.
pub trait OptimizerConfigExt {
    /// Optimizer for one parameter.
    type Fused: Optimizer;

    /// Returns the optimizer of one group of parameters, without the configured clipping of
    /// gradients. Use it instead of burn's `build()`.
    ///
    /// # Panics
    ///
    /// A value of the configuration is not finite.
    fn build_fused(&self) -> Self::Fused;

    /// Returns the optimizer of a whole model, which also clips the gradient of each parameter as
    /// configured. Use it instead of burn's `init()`.
    ///
    /// [`ModuleOptimizer::grad_clipping`] is `None` then, because the optimizer of each parameter
    /// clips the gradient in its pass.
    ///
    /// # Panics
    ///
    /// Same as [`build_fused`](Self::build_fused).
    fn init_fused(&self) -> ModuleOptimizer;
}

impl OptimizerConfigExt for SgdConfig {
    type Fused = FusedSgd;

    fn build_fused(&self) -> FusedSgd {
        let SgdValues { weight_decay, momentum, .. } = values(self);
        FusedSgd::new(weight_decay, momentum, None)
    }

    fn init_fused(&self) -> ModuleOptimizer {
        let SgdValues { weight_decay, momentum, gradient_clipping } = values(self);
        FusedSgd::new(weight_decay, momentum, gradient_clipping).into()
    }
}

impl OptimizerConfigExt for AdamConfig {
    type Fused = FusedAdam;

    fn build_fused(&self) -> FusedAdam {
        FusedAdam::new(self.build(), AdamValues { grad_clipping: None, ..values(self) })
    }

    fn init_fused(&self) -> ModuleOptimizer {
        FusedAdam::new(self.build(), values(self)).into()
    }
}

impl OptimizerConfigExt for AdamWConfig {
    type Fused = FusedAdamW;

    fn build_fused(&self) -> FusedAdamW {
        FusedAdamW::new(self.build(), AdamWValues { grad_clipping: None, ..values(self) })
    }

    fn init_fused(&self) -> ModuleOptimizer {
        FusedAdamW::new(self.build(), values(self)).into()
    }
}

/// Fields of [`SgdConfig`], which are private in burn.
#[derive(Debug, Deserialize)]
#[serde(crate = "burn::serde", deny_unknown_fields)]
struct SgdValues {
    weight_decay: Option<WeightDecayConfig>,
    momentum: Option<MomentumConfig>,
    gradient_clipping: Option<GradientClippingConfig>,
}

/// Fields of [`AdamConfig`].
#[derive(Clone, Debug, Deserialize)]
#[serde(crate = "burn::serde", deny_unknown_fields)]
struct AdamValues {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    amsgrad: bool,
    weight_decay: Option<WeightDecayConfig>,
    grad_clipping: Option<GradientClippingConfig>,
}

/// Fields of [`AdamWConfig`].
#[derive(Clone, Debug, Deserialize)]
#[serde(crate = "burn::serde", deny_unknown_fields)]
struct AdamWValues {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    weight_decay: f32,
    cautious_weight_decay: bool,
    amsgrad: bool,
    grad_clipping: Option<GradientClippingConfig>,
}

/// Reads the fields of a configuration through its serialized form, the only access to all of them.
/// JSON values keep all bits of finite numbers.
fn values<V: DeserializeOwned>(config: &impl Serialize) -> V {
    let json = serde_json::to_value(config).expect("burn's configurations have names as keys");
    match serde_json::from_value(json) {
        Ok(values) => values,
        Err(error) => panic!("the configuration of an optimizer has an invalid value: {error}"),
    }
}

#[cfg(test)]
mod tests;
