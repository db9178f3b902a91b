//! Adam and AdamW.

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::LearningRate;
use burn::optim::{Adam, AdamState, AdamW, AdamWState, AdaptiveMomentumState, Optimizer};
use burn::tensor::{Device, Tensor};

use super::pass::{Array, Clip, are_supported, clip, decayed, update_three};
use super::{AdamValues, AdamWValues};
#[cfg(feature = "cubecl")]
use crate::gpu::optim::Decay;

/// Fused [`Adam`]. See [`OptimizerConfigExt`](super::OptimizerConfigExt).
#[derive(Clone)]
pub struct FusedAdam {
    /// For unsupported tensors.
    burns: Adam,
    values: AdamValues,
}

/// Fused [`AdamW`]. See [`OptimizerConfigExt`](super::OptimizerConfigExt).
#[derive(Clone)]
pub struct FusedAdamW {
    /// For unsupported tensors.
    burns: AdamW,
    values: AdamWValues,
}

impl std::fmt::Debug for FusedAdam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FusedAdam").field(&self.values).finish()
    }
}

impl std::fmt::Debug for FusedAdamW {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FusedAdamW").field(&self.values).finish()
    }
}

impl FusedAdam {
    pub(super) fn new(burns: Adam, values: AdamValues) -> Self {
        Self { burns, values }
    }
}

impl FusedAdamW {
    pub(super) fn new(burns: AdamW, values: AdamWValues) -> Self {
        Self { burns, values }
    }
}

impl Optimizer for FusedAdam {
    type State<const D: usize> = AdamState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<AdamState<D>>,
    ) -> (Tensor<D>, Option<AdamState<D>>) {
        let AdamValues { beta_1, beta_2, epsilon, amsgrad, weight_decay, grad_clipping } =
            &self.values;
        let state = state.map(|state| state.momentum);
        #[cfg(feature = "cubecl")]
        if !*amsgrad && on_gpu::has_support(&tensor, &grad, state.as_ref()) {
            let grad = clip(grad_clipping.as_ref(), grad);
            let decay = weight_decay.as_ref().map(|config| Decay::OfGradient(config.penalty));
            let constants =
                on_gpu::Constants { betas: [*beta_1, *beta_2], epsilon: *epsilon, decay };
            let (tensor, state) = constants.step(lr, tensor, grad, state);
            return (tensor, Some(AdamState::new(state)));
        }
        if *amsgrad || !has_support(&tensor, &grad, state.as_ref()) {
            let grad = clip(grad_clipping.as_ref(), grad);
            return self.burns.step(lr, tensor, grad, state.map(AdamState::new));
        }
        let clip = Clip::new(grad_clipping.as_ref(), &grad);
        let grad = Array::new(grad);
        let moments = Moments::new([*beta_1, *beta_2], state, &grad);
        let penalty = weight_decay.as_ref().map(|config| config.penalty);
        let rate = lr as f32;
        // burn's operations, in burn's order.
        let time = moments.time as i32;
        let root = (1.0 - beta_2.powi(time)).sqrt();
        let factor = root / (1.0 - beta_1.powi(time));
        let epsilon = epsilon * root;
        let (tensor, state) = moments.step(
            tensor,
            grad,
            clip,
            #[inline(always)]
            move |weight, gradient| decayed(penalty, weight, gradient),
            #[inline(always)]
            move |weight, [first, second]| {
                weight - first * factor / (second.sqrt() + epsilon) * rate
            },
        );
        (tensor, Some(AdamState::new(state)))
    }

    fn to_device<const D: usize>(state: AdamState<D>, device: &Device) -> AdamState<D> {
        Adam::to_device(state, device)
    }
}

impl Optimizer for FusedAdamW {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<AdamWState<D>>,
    ) -> (Tensor<D>, Option<AdamWState<D>>) {
        let AdamWValues { beta_1, beta_2, epsilon, weight_decay, amsgrad, .. } = self.values;
        let is_cautious = self.values.cautious_weight_decay;
        let clipping: Option<&GradientClippingConfig> = self.values.grad_clipping.as_ref();
        let state = state.map(|state| state.momentum);
        let decay = lr * f64::from(weight_decay);
        #[cfg(feature = "cubecl")]
        if !amsgrad && on_gpu::has_support(&tensor, &grad, state.as_ref()) {
            let grad = clip(clipping, grad);
            let decay = match is_cautious {
                _ if decay == 0.0 => None,
                true => Some(Decay::Cautious(decay as f32)),
                false => Some(Decay::Factor((1.0 - decay) as f32)),
            };
            let constants = on_gpu::Constants { betas: [beta_1, beta_2], epsilon, decay };
            let (tensor, state) = constants.step(lr, tensor, grad, state);
            return (tensor, Some(AdamWState::new(state)));
        }
        if amsgrad || !has_support(&tensor, &grad, state.as_ref()) {
            let grad = clip(clipping, grad);
            return self.burns.step(lr, tensor, grad, state.map(AdamWState::new));
        }
        let clip = Clip::new(clipping, &grad);
        let grad = Array::new(grad);
        let moments = Moments::new([beta_1, beta_2], state, &grad);
        // burn's operations, in burn's order.
        let time = moments.time as i32;
        let (first_divisor, second_divisor) = (1.0 - beta_1.powi(time), 1.0 - beta_2.powi(time));
        let (keeps, decay_rate, kept, rate) =
            (decay == 0.0, decay as f32, (1.0 - decay) as f32, lr as f32);
        let (tensor, state) = moments.step(
            tensor,
            grad,
            clip,
            #[inline(always)]
            move |_, gradient| gradient,
            #[inline(always)]
            move |weight, [first, second]| {
                let decayed = if keeps {
                    weight
                } else if is_cautious {
                    let is_against = (weight >= 0.0) != (first >= 0.0);
                    weight - if is_against { 0.0 } else { weight * decay_rate }
                } else {
                    weight * kept
                };
                let delta = first / first_divisor / ((second / second_divisor).sqrt() + epsilon);
                decayed - delta * rate
            },
        );
        (tensor, Some(AdamWState::new(state)))
    }

    fn to_device<const D: usize>(state: AdamWState<D>, device: &Device) -> AdamWState<D> {
        AdamW::to_device(state, device)
    }
}

fn has_support<const D: usize>(
    tensor: &Tensor<D>,
    gradient: &Tensor<D>,
    state: Option<&AdaptiveMomentumState<D>>,
) -> bool {
    let mut tensors = vec![tensor, gradient];
    if let Some(state) = state {
        tensors.extend([&state.moment_1, &state.moment_2]);
    }
    are_supported(&tensors)
}

/// Steps on GPUs.
#[cfg(feature = "cubecl")]
mod on_gpu {
    use burn::optim::{AdaptiveMomentumState, LearningRate};
    use burn::tensor::Tensor;

    use crate::gpu::optim::{AdamStep, Decay, adam, are_supported};

    /// Values that are the same in each step.
    pub(super) struct Constants {
        pub(super) betas: [f32; 2],
        pub(super) epsilon: f32,
        pub(super) decay: Option<Decay>,
    }

    /// Returns whether the kernels support these tensors. burn's operators take the first step,
    /// which has no state.
    pub(super) fn has_support<const D: usize>(
        tensor: &Tensor<D>,
        gradient: &Tensor<D>,
        state: Option<&AdaptiveMomentumState<D>>,
    ) -> bool {
        state.is_some_and(|state| {
            are_supported(&[tensor, gradient, &state.moment_1, &state.moment_2])
        })
    }

    impl Constants {
        /// Takes a step with tensors that [have support](has_support).
        pub(super) fn step<const D: usize>(
            self,
            rate: LearningRate,
            tensor: Tensor<D>,
            gradient: Tensor<D>,
            state: Option<AdaptiveMomentumState<D>>,
        ) -> (Tensor<D>, AdaptiveMomentumState<D>) {
            let Self { betas, epsilon, decay } = self;
            let AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2 } =
                state.expect("supported tensors include the state");
            let divisor = |beta: f32| 1.0 - beta.powi(time as i32 + 1);
            let step =
                AdamStep { rate: rate as f32, betas, divisors: betas.map(divisor), epsilon, decay };
            let [tensor, moment_1, moment_2] = adam(step, tensor, gradient, [moment_1, moment_2]);
            let time = time + 1;
            (tensor, AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2 })
        }
    }
}

/// Moving averages of the gradient and of its square.
struct Moments<const D: usize> {
    betas: [f32; 2],
    /// Number of this step, from 1.
    time: usize,
    first: Array,
    second: Array,
    /// State of AMSGrad, from a record of an optimizer that used it.
    max: Option<Tensor<D>>,
}

impl<const D: usize> Moments<D> {
    fn new(betas: [f32; 2], state: Option<AdaptiveMomentumState<D>>, gradient: &Array) -> Self {
        match state {
            Some(state) => Self {
                betas,
                time: state.time + 1,
                first: Array::new(state.moment_1),
                second: Array::new(state.moment_2),
                max: state.max_moment_2,
            },
            // The first step replaces the copied values.
            None => {
                let (first, second) = (gradient.copied(), gradient.copied());
                Self { betas, time: 1, first, second, max: None }
            }
        }
    }

    /// Updates the moments with the gradients that `decayed(weight, gradient)` returns, and the
    /// weights with `updated(weight, moments)`.
    fn step(
        mut self,
        tensor: Tensor<D>,
        mut gradient: Array,
        clip: Clip,
        decayed: impl Fn(f32, f32) -> f32 + Sync,
        updated: impl Fn(f32, [f32; 2]) -> f32 + Sync,
    ) -> (Tensor<D>, AdaptiveMomentumState<D>) {
        let tensor = Array::new(tensor);
        let [beta_1, beta_2] = self.betas;
        let (share_1, share_2) = (1.0 - beta_1, 1.0 - beta_2);
        let is_first = self.time == 1;
        update_three(
            [&mut gradient, &mut self.first, &mut self.second],
            &tensor,
            clip,
            #[inline(always)]
            move |[gradient, first, second], weight| {
                let gradient = decayed(weight, gradient);
                let added = [gradient * share_1, gradient * gradient * share_2];
                let [first, second] = if is_first {
                    added
                } else {
                    [first * beta_1 + added[0], second * beta_2 + added[1]]
                };
                [updated(weight, [first, second]), first, second]
            },
        );
        let moments = [self.first, self.second].map(Array::into_tensor);
        let [moment_1, moment_2] = moments;
        let state =
            AdaptiveMomentumState { time: self.time, moment_1, moment_2, max_moment_2: self.max };
        (gradient.into_tensor(), state)
    }
}
