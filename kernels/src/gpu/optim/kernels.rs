//! Kernels in CubeCL.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

#[cube(launch)]
pub(super) fn sgd_kernel(
    weight: &mut Tensor<f32>,
    gradient: &Tensor<f32>,
    velocity: &mut Tensor<f32>,
    num: u32,
    rate: f32,
    penalty: f32,
    momentum: f32,
    share: f32,
    #[comptime] has_penalty: bool,
    #[comptime] is_nesterov: bool,
) {
    let index = ABSOLUTE_POS;
    if index >= num as usize {
        terminate!();
    }
    let before = weight[index];
    let mut change = gradient[index];
    if has_penalty {
        change += before * penalty;
    }
    let moved = change * share + velocity[index] * momentum;
    velocity[index] = moved;
    let mut delta = moved;
    if is_nesterov {
        delta = moved * momentum + change;
    }
    weight[index] = before - delta * rate;
}

#[cube(launch)]
pub(super) fn adam_kernel(
    weight: &mut Tensor<f32>,
    gradient: &Tensor<f32>,
    first: &mut Tensor<f32>,
    second: &mut Tensor<f32>,
    num: u32,
    rate: f32,
    beta_1: f32,
    beta_2: f32,
    divisor_1: f32,
    divisor_2: f32,
    epsilon: f32,
    decay: f32,
    #[comptime] is_decay_of_gradient: bool,
    #[comptime] is_factor: bool,
    #[comptime] is_cautious: bool,
) {
    let index = ABSOLUTE_POS;
    if index >= num as usize {
        terminate!();
    }
    let before = weight[index];
    let mut change = gradient[index];
    if is_decay_of_gradient {
        change += before * decay;
    }
    let moment_1 = first[index] * beta_1 + change * (1.0 - beta_1);
    let moment_2 = second[index] * beta_2 + change * change * (1.0 - beta_2);
    first[index] = moment_1;
    second[index] = moment_2;
    let mut decayed = before;
    if is_factor {
        decayed = before * decay;
    }
    if is_cautious {
        let has_sign_of_moment = (before >= 0.0) == (moment_1 >= 0.0);
        decayed = select(has_sign_of_moment, before - before * decay, before);
    }
    let delta = moment_1 / divisor_1 / ((moment_2 / divisor_2).sqrt() + epsilon);
    weight[index] = decayed - delta * rate;
}
