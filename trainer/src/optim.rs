//! Optimizers, learning rates and gradient sums.

use std::fmt;

use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ParamGroup, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, Optimizer, SgdConfig};

use crate::collective::Collective;
use crate::context::Context;
#[cfg(feature = "learner")]
use crate::rng;
use crate::{Result, record};

mod clipped;
#[cfg(feature = "learner")]
mod external;
mod gradients;
mod schedule;
mod selection;
mod state;

use clipped::ClippedByNorm;
#[cfg(feature = "learner")]
pub(crate) use external::{ExternalOptimizer, ExternalSnapshot};
pub(crate) use gradients::{AllReduceState, GradientSum, PendingGradients};
pub use schedule::Schedule;
pub(crate) use selection::Selection;
pub(crate) use state::OptimizersState;

/// One optimizer for all parameters, or several for groups of parameters.
pub struct Optimizers {
    optimizer: ModuleOptimizer,
    rates: Vec<Rate>,
    clip_norm: Option<f64>,
    aggregate: u32,
    /// Number of steps taken.
    steps: u64,
    /// Factor of the learning rates, set by callbacks.
    scale: f64,
    /// If set, takes the steps instead of all the above.
    #[cfg(feature = "learner")]
    external: Option<Box<dyn ExternalOptimizer>>,
}

/// Learning rate of a group of parameters.
struct Rate {
    /// Regular expression of the group; `None` for the first group, which has all parameters.
    path: Option<String>,
    group: ParamGroup,
    schedule: Schedule,
}

impl fmt::Debug for Optimizers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Optimizers")
            .field("groups", &self.rates.iter().map(|rate| &rate.path).collect::<Vec<_>>())
            .field("clip_norm", &self.clip_norm)
            .field("aggregate", &self.aggregate)
            .field("steps", &self.steps)
            .field("scale", &self.scale)
            .finish_non_exhaustive()
    }
}

impl Optimizers {
    /// Creates one optimizer for all parameters: `Optimizers::one(AdamConfig::new().init(), 1e-3)`.
    ///
    /// `init()`, not `build()`, applies the configuration's `grad_clipping`.
    pub fn one(optimizer: impl Into<ModuleOptimizer>, rate: impl Into<Schedule>) -> Self {
        let all = Rate { path: None, group: ParamGroup::all(), schedule: rate.into() };
        Self {
            optimizer: optimizer.into(),
            rates: vec![all],
            clip_norm: None,
            aggregate: 1,
            steps: 0,
            scale: 1.0,
            #[cfg(feature = "learner")]
            external: None,
        }
    }

    /// Adds an optimizer for the parameters whose path matches this regular expression, at any
    /// position in the path. An example of a path is `encoder.output.weight`. If a parameter is in
    /// several groups, the last one applies.
    ///
    /// Groups use paths because burn assigns new parameter IDs in each process. `build()` ignores
    /// the configuration's `grad_clipping`; see [`group_clipped`](Self::group_clipped).
    ///
    /// # Errors
    ///
    /// Fails if `path` is not a valid regular expression. The start of training checks that it
    /// matches a parameter.
    pub fn group(
        self,
        path: &str,
        optimizer: impl Optimizer + 'static,
        rate: impl Into<Schedule>,
    ) -> Result<Self> {
        self.with_group(path, optimizer, None, rate.into())
    }

    /// Same as [`group`](Self::group), with clipping of each parameter's gradient. Norms are summed
    /// in a fixed order, so repeated and resumed trainings are bit-identical.
    ///
    /// # Errors
    ///
    /// Same as [`group`](Self::group).
    pub fn group_clipped(
        self,
        path: &str,
        optimizer: impl Optimizer + 'static,
        clipping: GradientClippingConfig,
        rate: impl Into<Schedule>,
    ) -> Result<Self> {
        match clipping {
            GradientClippingConfig::Norm(norm_max) => {
                self.with_group(path, ClippedByNorm { optimizer, norm_max }, None, rate.into())
            }
            GradientClippingConfig::Value(_) => {
                self.with_group(path, optimizer, Some(clipping.init()), rate.into())
            }
        }
    }

    fn with_group(
        mut self,
        path: &str,
        optimizer: impl Optimizer + 'static,
        clipping: Option<GradientClipping>,
        schedule: Schedule,
    ) -> Result<Self> {
        let group = ParamGroup::from_regex(path).map_err(|error| {
            format!("optimizer group {path:?}: invalid regular expression: {error:?}")
        })?;
        self.optimizer = self.optimizer.with_group(group.clone(), optimizer, clipping);
        self.rates.push(Rate { path: Some(path.into()), group, schedule });
        Ok(self)
    }

    /// Clips gradients by their global norm over all parameters, to at most `norm`, which must be
    /// positive. burn's own clipping is per parameter.
    #[must_use]
    pub fn clip_norm(self, norm: f64) -> Self {
        Self { clip_norm: Some(norm), ..self }
    }

    /// Accumulates the gradients of this many batches before a step (default: 1). A value above 1
    /// in the experiment's `optimizations.aggregationFrequency` takes precedence.
    #[must_use]
    pub fn aggregate(self, batches: u32) -> Self {
        Self { aggregate: batches.max(1), ..self }
    }

    /// Placeholder while optimizers are replaced.
    pub(crate) fn none() -> Self {
        Self::one(SgdConfig::new().build(), 0.0)
    }

    /// Returns the model with weights sampled from the trial's seed. A program with burn's training
    /// loop seeds the stream itself, and its weights are sampled from that stream.
    pub(crate) fn initialize_weights<M: Module>(&self, context: &Context, model: M) -> M {
        #[cfg(feature = "learner")]
        if self.external.is_some() {
            return rng::with_exclusive_stream(|| record::initialize(model));
        }
        context.with_weight_seed(|| record::initialize(model))
    }

    /// Returns the number of batches per step.
    pub(crate) fn aggregation(&self) -> u32 {
        self.aggregate
    }

    /// Returns whether a step was taken, in this process or before its checkpoint.
    pub(crate) fn has_stepped(&self) -> bool {
        self.steps > 0
    }

    /// Returns the factor of the learning rates, which callbacks set.
    pub(crate) fn scale(&self) -> f64 {
        self.scale
    }

    pub(crate) fn set_scale(&mut self, scale: f64) {
        self.scale = scale;
    }

    /// Fails if a group matches none of the model's paths, or if a setting is invalid.
    pub(crate) fn check(&self, paths: &[String]) -> Result<()> {
        if let Some(norm) = self.clip_norm.filter(|norm| norm.is_nan() || *norm <= 0.0) {
            return Err(format!("clip_norm is {norm}; it must be more than 0").into());
        }
        let any = ParamId::from(0);
        for rate in &self.rates {
            let Some(expression) = &rate.path else { continue };
            if !paths.iter().any(|path| rate.group.matches(&any, Some(path))) {
                let paths = paths.join(", ");
                let text = format!(
                    "optimizer group {expression:?} matches none of the parameters {paths}"
                );
                return Err(text.into());
            }
        }
        Ok(())
    }

    /// Returns the gradients of a step, given the sums over all ranks.
    pub(crate) fn normalize<M: Module>(
        &self,
        model: &M,
        sum: GradientSum,
        ranks: &dyn Collective,
    ) -> Result<GradientsParams> {
        sum.normalize(model, self.clip_norm, ranks)
    }

    /// Takes one step with these gradients.
    pub(crate) fn step<M: Module + 'static>(
        &mut self,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        #[cfg(feature = "learner")]
        if let Some(external) = &mut self.external {
            drop(model);
            self.steps += 1;
            return external::step_external(&mut **external, gradients);
        }
        let rates = self.next_rates();
        self.step_at(&rates, model, gradients)
    }

    /// Returns the learning rate of each group for the next step, and advances the schedules.
    pub(crate) fn next_rates(&mut self) -> Vec<f64> {
        let (steps, scale) = (self.steps, self.scale);
        self.steps += 1;
        self.rates.iter_mut().map(|rate| rate.schedule.next(steps) * scale).collect()
    }

    /// Takes one step with these gradients and learning rates.
    pub(crate) fn step_at<M: Module + 'static>(
        &mut self,
        rates: &[f64],
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        // burn can build a learning rate with groups only by stepping a scheduler with groups.
        let groups = self.rates.iter().map(|rate| rate.group.clone());
        let mut rates = groups.zip(rates.iter().map(|rate| ConstantLr::new(*rate)));
        let (_, base) = rates.next().ok_or("no optimizer")?;
        let scheduler = ModuleLrScheduler::new(base);
        let rate = rates.fold(scheduler, |all, (group, rate)| all.with_group(group, rate)).step();
        Ok(self.optimizer.step(rate, model, gradients))
    }
}

#[cfg(test)]
mod tests;
