//! SGD with momentum and weight decay.

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::LearningRate;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{Optimizer, RecordState, StateSink, StateSource, join_path};
use burn::tensor::{Device, Tensor};

use super::pass::{Array, Clip, are_supported, clip, decayed, update_one, update_two};

/// Fused [`Sgd`](burn::optim::Sgd). See [`OptimizerConfigExt`](super::OptimizerConfigExt).
#[derive(Clone, Debug)]
pub struct FusedSgd {
    penalty: Option<f32>,
    momentum: Option<Momentum>,
    clipping: Option<GradientClippingConfig>,
}

/// Values of [`MomentumConfig`].
#[derive(Clone, Copy, Debug)]
struct Momentum {
    momentum: f32,
    /// Factor of the gradient. burn keeps it in double precision.
    share: f64,
    nesterov: bool,
}

impl FusedSgd {
    pub(super) fn new(
        weight_decay: Option<WeightDecayConfig>,
        momentum: Option<MomentumConfig>,
        clipping: Option<GradientClippingConfig>,
    ) -> Self {
        let momentum = momentum.map(|config| Momentum {
            momentum: config.momentum as f32,
            share: 1.0 - config.dampening,
            nesterov: config.nesterov,
        });
        Self { penalty: weight_decay.map(|config| config.penalty), momentum, clipping }
    }

    /// Same as [`step`](Optimizer::step), by burn's operators.
    fn step_by_operators<const D: usize>(
        &self,
        rate: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        velocity: Option<Tensor<D>>,
    ) -> (Tensor<D>, Option<Tensor<D>>) {
        let mut gradient = clip(self.clipping.as_ref(), gradient);
        if let Some(penalty) = self.penalty {
            gradient = tensor.clone().mul_scalar(penalty).add(gradient);
        }
        let Some(Momentum { momentum, share, nesterov }) = self.momentum else {
            return (tensor - gradient.mul_scalar(rate), velocity);
        };
        let velocity = match velocity {
            Some(velocity) => gradient.clone().mul_scalar(share).add(velocity.mul_scalar(momentum)),
            None => gradient.clone(),
        };
        let delta = match nesterov {
            true => velocity.clone().mul_scalar(momentum).add(gradient),
            false => velocity.clone(),
        };
        (tensor - delta.mul_scalar(rate), Some(velocity))
    }

    /// Same as [`step`](Optimizer::step), for weights, gradient and velocity that kernels support.
    #[cfg(feature = "cubecl")]
    fn step_on_gpu<const D: usize>(
        &self,
        rate: LearningRate,
        Momentum { momentum, share, nesterov }: Momentum,
        [tensor, gradient, velocity]: [Tensor<D>; 3],
    ) -> [Tensor<D>; 2] {
        let step = crate::gpu::optim::SgdStep {
            rate: rate as f32,
            penalty: self.penalty,
            momentum,
            share: share as f32,
            is_nesterov: nesterov,
        };
        let gradient = clip(self.clipping.as_ref(), gradient);
        crate::gpu::optim::sgd(step, tensor, gradient, velocity)
    }

    /// Same as [`step`](Optimizer::step), for supported tensors.
    fn step_in_one_pass<const D: usize>(
        &self,
        rate: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        velocity: Option<Tensor<D>>,
    ) -> (Tensor<D>, Option<Tensor<D>>) {
        let clip = Clip::new(self.clipping.as_ref(), &gradient);
        let (tensor, mut gradient) = (Array::new(tensor), Array::new(gradient));
        let (rate, penalty) = (rate as f32, self.penalty);
        let Some(Momentum { momentum, share, nesterov }) = self.momentum else {
            update_one(
                [&mut gradient],
                &tensor,
                clip,
                #[inline(always)]
                move |[gradient], weight| [weight - decayed(penalty, weight, gradient) * rate],
            );
            return (gradient.into_tensor(), velocity);
        };
        let (share, is_first) = (share as f32, velocity.is_none());
        // The first step replaces the copied values.
        let mut velocity = velocity.map_or_else(|| gradient.copied(), Array::new);
        update_two(
            [&mut gradient, &mut velocity],
            &tensor,
            clip,
            #[inline(always)]
            move |[gradient, velocity], weight| {
                let gradient = decayed(penalty, weight, gradient);
                let velocity =
                    if is_first { gradient } else { gradient * share + velocity * momentum };
                let delta = if nesterov { velocity * momentum + gradient } else { velocity };
                [weight - delta * rate, velocity]
            },
        );
        (gradient.into_tensor(), Some(velocity.into_tensor()))
    }
}

impl Optimizer for FusedSgd {
    type State<const D: usize> = FusedSgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<FusedSgdState<D>>,
    ) -> (Tensor<D>, Option<FusedSgdState<D>>) {
        let velocity = state.and_then(|state| state.velocity);
        let mut tensors = vec![&tensor, &grad];
        tensors.extend(&velocity);
        if are_supported(&tensors) {
            let (tensor, velocity) = self.step_in_one_pass(lr, tensor, grad, velocity);
            return (tensor, Some(FusedSgdState { velocity }));
        }
        #[cfg(feature = "cubecl")]
        if let (Some(momentum), 3, true) =
            (self.momentum, tensors.len(), crate::gpu::optim::are_supported(&tensors))
        {
            let velocity = velocity.expect("the third tensor is the velocity");
            let [tensor, velocity] = self.step_on_gpu(lr, momentum, [tensor, grad, velocity]);
            return (tensor, Some(FusedSgdState { velocity: Some(velocity) }));
        }
        let (tensor, velocity) = self.step_by_operators(lr, tensor, grad, velocity);
        (tensor, Some(FusedSgdState { velocity }))
    }

    fn to_device<const D: usize>(state: FusedSgdState<D>, device: &Device) -> FusedSgdState<D> {
        FusedSgdState { velocity: state.velocity.map(|velocity| velocity.to_device(device)) }
    }
}

/// State of [`FusedSgd`] for one parameter. Its record is that of burn's
/// [`SgdState`](burn::optim::SgdState), whose fields are private.
#[derive(Clone, Debug)]
pub struct FusedSgdState<const D: usize> {
    velocity: Option<Tensor<D>>,
}

/// Field of burn's state, and the field in it.
const MOMENTUM: &str = "momentum";
const VELOCITY: &str = "velocity";

impl<const D: usize> RecordState for FusedSgdState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if let Some(velocity) = &self.velocity {
            out.push_tensor(&join_path(prefix, MOMENTUM), VELOCITY, velocity.to_data());
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let data = src.take_tensor(&join_path(prefix, MOMENTUM), VELOCITY);
        Some(Self { velocity: data.map(|data| Tensor::from_data(data, device)) })
    }
}
